"""Whose an address is, and what an activator is told of it."""

from typing import Any

from scaler.activation.sources import NOBODY, Follower, Sources, keep_source


def pod(
    uid: str, namespace: str, *addresses: str, host: bool = False, phase: str = "Running"
) -> dict[str, Any]:
    return keep_source(
        {
            "metadata": {"uid": uid, "namespace": namespace, "name": uid, "labels": {"a": "b"}},
            "spec": {"hostNetwork": host, "containers": []},
            "status": {
                "phase": phase,
                "podIP": addresses[0] if addresses else None,
                "podIPs": [{"ip": one} for one in addresses],
            },
        }
    )


def following(sources: Sources, *namespaces: str) -> Follower:
    follower = sources.follow()
    follower.want(frozenset(namespaces))
    return follower


def test_a_pods_addresses_are_its_namespaces_while_it_lives() -> None:
    sources = Sources()
    sources.set_pod(pod("1", "a", "10.0.0.1", "fd00::1"))
    assert (sources.whose("10.0.0.1"), sources.whose("fd00::1")) == ("a", "a")
    sources.set_pod(pod("1", "a", "10.0.0.2"))
    assert (sources.whose("10.0.0.1"), sources.whose("10.0.0.2")) == (NOBODY, "a")
    sources.set_pod(pod("1", "a", "10.0.0.2", phase="Succeeded"))
    assert sources.whose("10.0.0.2") == NOBODY


def test_the_hosts_address_is_nobodys() -> None:
    sources = Sources()
    sources.set_pod(pod("1", "a", "192.168.0.1", host=True))
    assert sources.whose("192.168.0.1") == NOBODY
    assert sources.addresses("a") == frozenset()


def test_what_two_namespaces_claim_is_nobodys_until_that_is_settled() -> None:
    sources = Sources()
    follower = following(sources, "a", "b")
    sources.set_pod(pod("old", "a", "10.0.0.1"))
    assert follower.take() == {"10.0.0.1": "a"}
    sources.set_pod(pod("new", "b", "10.0.0.1"))
    assert sources.whose("10.0.0.1") == NOBODY
    assert follower.take() == {"10.0.0.1": NOBODY}
    sources.pod_gone(pod("old", "a", "10.0.0.1"))
    assert follower.take() == {"10.0.0.1": "b"}
    # Two of one namespace do not contradict each other.
    sources.set_pod(pod("third", "b", "10.0.0.1"))
    sources.pod_gone(pod("new", "b"))
    assert sources.whose("10.0.0.1") == "b"
    assert not follower.has_news


def test_an_activator_hears_of_the_namespaces_it_needs_and_of_no_others() -> None:
    sources = Sources()
    sources.set_pod(pod("1", "a", "10.0.0.1"))
    sources.set_pod(pod("2", "b", "10.0.0.2"))
    follower = following(sources, "a")
    assert follower.take() == {"10.0.0.1": "a"}
    sources.set_pod(pod("3", "b", "10.0.0.3"))
    assert not follower.has_news
    follower.want(frozenset({"b"}))
    assert follower.take() == {"10.0.0.1": NOBODY, "10.0.0.2": "b", "10.0.0.3": "b"}
    # An address that goes from a namespace it follows to one it does not is nobody's to it.
    sources.pod_gone(pod("2", "b"))
    sources.set_pod(pod("4", "a", "10.0.0.2"))
    assert follower.take() == {"10.0.0.2": NOBODY}


def test_the_newest_word_counts_and_what_is_known_is_no_news() -> None:
    sources = Sources()
    follower = following(sources, "a")
    for n in range(100):
        sources.set_pod(pod(f"u{n}", "a", "10.0.0.1"))
        sources.pod_gone(pod(f"u{n}", "a"))
    assert not follower.has_news
    sources.set_pod(pod("x", "a", "10.0.0.1"))
    sources.set_pod(pod("x", "a", "10.0.0.1"))
    assert follower.take() == {"10.0.0.1": "a"}
    assert follower.take() == {}
    sources.leave(follower)
    sources.pod_gone(pod("x", "a"))
    assert not follower.has_news


def test_nothing_is_kept_of_pods_that_are_gone() -> None:
    sources = Sources()
    for n in range(50):
        sources.set_pod(pod(f"u{n}", f"n{n}", f"10.0.0.{n}"))
    for n in range(50):
        sources.pod_gone(pod(f"u{n}", f"n{n}"))
    sources.pod_gone(pod("never", "a"))
    assert not any(vars(sources).values())
