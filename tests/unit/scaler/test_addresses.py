"""Whose an address is, and what an activator is told of it."""

from typing import Any

from scaler.activation.addresses import UNKNOWN, AddressSubscription, ClientAddresses, keep_client


def pod(
    uid: str, namespace: str, *addresses: str, host: bool = False, phase: str = "Running"
) -> dict[str, Any]:
    return keep_client(
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


def following(addresses: ClientAddresses, *namespaces: str) -> AddressSubscription:
    follower = addresses.subscribe()
    follower.select(frozenset(namespaces))
    return follower


def test_a_pods_addresses_are_its_namespaces_while_it_lives() -> None:
    addresses = ClientAddresses()
    addresses.set_pod(pod("1", "a", "10.0.0.1", "fd00::1"))
    assert (addresses.namespace_of("10.0.0.1"), addresses.namespace_of("fd00::1")) == ("a", "a")
    addresses.set_pod(pod("1", "a", "10.0.0.2"))
    assert (addresses.namespace_of("10.0.0.1"), addresses.namespace_of("10.0.0.2")) == (UNKNOWN, "a")
    addresses.set_pod(pod("1", "a", "10.0.0.2", phase="Succeeded"))
    assert addresses.namespace_of("10.0.0.2") == UNKNOWN


def test_the_hosts_address_is_nobodys() -> None:
    addresses = ClientAddresses()
    addresses.set_pod(pod("1", "a", "192.168.0.1", host=True))
    assert addresses.namespace_of("192.168.0.1") == UNKNOWN
    assert addresses.addresses("a") == frozenset()


def test_what_two_namespaces_claim_is_nobodys_until_that_is_settled() -> None:
    addresses = ClientAddresses()
    follower = following(addresses, "a", "b")
    addresses.set_pod(pod("old", "a", "10.0.0.1"))
    assert follower.take() == {"10.0.0.1": "a"}
    addresses.set_pod(pod("new", "b", "10.0.0.1"))
    assert addresses.namespace_of("10.0.0.1") == UNKNOWN
    assert follower.take() == {"10.0.0.1": UNKNOWN}
    addresses.delete_pod(pod("old", "a", "10.0.0.1"))
    assert follower.take() == {"10.0.0.1": "b"}
    # Two of one namespace do not contradict each other.
    addresses.set_pod(pod("third", "b", "10.0.0.1"))
    addresses.delete_pod(pod("new", "b"))
    assert addresses.namespace_of("10.0.0.1") == "b"
    assert not follower.has_changes


def test_an_activator_hears_of_the_namespaces_it_needs_and_of_no_others() -> None:
    addresses = ClientAddresses()
    addresses.set_pod(pod("1", "a", "10.0.0.1"))
    addresses.set_pod(pod("2", "b", "10.0.0.2"))
    follower = following(addresses, "a")
    assert follower.take() == {"10.0.0.1": "a"}
    addresses.set_pod(pod("3", "b", "10.0.0.3"))
    assert not follower.has_changes
    follower.select(frozenset({"b"}))
    assert follower.take() == {"10.0.0.1": UNKNOWN, "10.0.0.2": "b", "10.0.0.3": "b"}
    # An address that goes from a namespace it follows to one it does not is nobody's to it.
    addresses.delete_pod(pod("2", "b"))
    addresses.set_pod(pod("4", "a", "10.0.0.2"))
    assert follower.take() == {"10.0.0.2": UNKNOWN}


def test_the_newest_word_counts_and_what_is_known_is_no_news() -> None:
    addresses = ClientAddresses()
    follower = following(addresses, "a")
    for n in range(100):
        addresses.set_pod(pod(f"u{n}", "a", "10.0.0.1"))
        addresses.delete_pod(pod(f"u{n}", "a"))
    assert not follower.has_changes
    addresses.set_pod(pod("x", "a", "10.0.0.1"))
    addresses.set_pod(pod("x", "a", "10.0.0.1"))
    assert follower.take() == {"10.0.0.1": "a"}
    assert follower.take() == {}
    addresses.unsubscribe(follower)
    addresses.delete_pod(pod("x", "a"))
    assert not follower.has_changes


def test_nothing_is_kept_of_pods_that_are_gone() -> None:
    addresses = ClientAddresses()
    for n in range(50):
        addresses.set_pod(pod(f"u{n}", f"n{n}", f"10.0.0.{n}"))
    for n in range(50):
        addresses.delete_pod(pod(f"u{n}", f"n{n}"))
    addresses.delete_pod(pod("never", "a"))
    assert not any(vars(addresses).values())
