"""Who goes when memory is needed."""

from dataclasses import replace

from berth.contract.scaling import ModelKey
from scaler.core.retention import SETTLE_NS, Evictions, IdleReplica, least_recently_used

SECOND = 1_000_000_000
NEEDY = ModelKey("a", "needy")
OTHER = ModelKey("a", "other")


def idle(name: str, *, priority: int = 0, used: int = 0) -> IdleReplica:
    return IdleReplica(
        pod=name, uid=f"u-{name}", model=ModelKey("a", f"of-{name}"), priority=priority, last_used_ns=used
    )


COPIES = {f"a/{name}": idle(name) for name in ("x", "y", "z")}


def chosen(
    evictions: Evictions, *names: str, needy: ModelKey = NEEDY, priority: int = 0, at: int = 0
) -> list[str]:
    named = [f"a/{name}" for name in names]
    return [one.pod for one in evictions.chosen(needy, priority, named, COPIES, at * SECOND)]


def test_the_least_recently_used_come_first() -> None:
    replicas = [idle("young", used=9), idle("old", used=1), idle("dear", priority=5), idle("cheap")]
    assert [one.pod for one in least_recently_used(replicas)] == ["cheap", "dear", "old", "young"]
    assert len(least_recently_used(replicas, most=2)) == 2
    assert len(least_recently_used(idle(f"p{n}") for n in range(2000))) == 1024, "a question is bounded"


def test_all_that_were_named_go_or_none() -> None:
    assert chosen(Evictions(), "x", "y") == ["x", "y"]
    assert chosen(Evictions(), "x", "busy") == []
    assert chosen(Evictions()) == []


def test_nobody_goes_for_a_lower_priority_or_for_itself() -> None:
    evictions = Evictions()
    dear = {"a/x": replace(COPIES["a/x"], priority=3)}
    assert evictions.chosen(NEEDY, 2, ["a/x"], dear, 0) == ()
    assert evictions.chosen(dear["a/x"].model, 3, ["a/x"], dear, 0) == ()
    assert len(evictions.chosen(NEEDY, 3, ["a/x"], dear, 0)) == 1


def test_no_more_go_while_some_are_on_their_way() -> None:
    evictions = Evictions()
    assert chosen(evictions, "x") == ["x"]
    assert chosen(evictions, "y") == []
    assert chosen(evictions, "x", needy=OTHER) == []
    assert chosen(evictions, "z", needy=OTHER) == ["z"]
    assert evictions.is_going("u-x")


def test_memory_is_free_a_while_after_the_pod_has_gone() -> None:
    evictions = Evictions()
    chosen(evictions, "x")
    evictions.forget_done(lambda uid: True, 60 * SECOND)
    assert chosen(evictions, "y", at=60) == []
    evictions.forget_done(lambda uid: False, 61 * SECOND)
    evictions.forget_done(lambda uid: False, 61 * SECOND + SETTLE_NS - 1)
    assert chosen(evictions, "y", at=62) == []
    evictions.forget_done(lambda uid: False, 61 * SECOND + SETTLE_NS)
    assert chosen(evictions, "y", at=90) == ["y"]


def test_memory_is_free_once_all_have_gone() -> None:
    evictions = Evictions()
    chosen(evictions, "x", "y")
    evictions.forget_done(lambda uid: uid == "u-y", 1 * SECOND)
    evictions.forget_done(lambda uid: uid == "u-y", 1 * SECOND + SETTLE_NS)
    assert chosen(evictions, "z", at=12) == []


def test_of_equals_the_order_is_always_the_same() -> None:
    replicas = [idle("b"), idle("a")]
    assert least_recently_used(replicas) == least_recently_used(replicas[::-1])


def test_who_does_not_go_is_not_waited_for_for_ever() -> None:
    evictions = Evictions()
    chosen(evictions, "x")
    evictions.forget_done(lambda uid: True, 120 * SECOND)
    assert chosen(evictions, "y", at=120) == ["y"]
