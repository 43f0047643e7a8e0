"""The search for pods that could go comes to every node in the end, and forgets no reason for good."""

from typing import Any

import pytest

from binder.engine.preemption import MOST_QUESTIONS, Questions
from binder.loop import nominate as room
from binder.rules.domains import DomainRule
from tests.fakes.binder import Bench
from tests.fakes.objects import KEYS
from tests.fakes.zones import HOST, apart, term

_ZONE = "topology.kubernetes.io/zone"


async def patiently(bench: Bench, seconds: int) -> None:
    """The binder's loop for so long."""
    for _ in range(seconds):
        bench.now += 1.0
        await bench.until_quiet()


def lure(bench: Bench, name: str, **more: Any) -> None:
    """A node whose one model, of low priority, holds the memory that is wanted."""
    bench.node(name, 16, **more)
    bench.resident(f"low-{name}", name, 16)


@pytest.mark.parametrize("lures", [64, 640])
async def test_nodes_whose_other_resources_are_taken_for_good_hide_no_other(lures: int) -> None:
    """Their GPU memory would do, but their CPU is others', who are no victims (binder H2)."""
    async with Bench() as bench:
        for number in range(lures):
            lure(bench, f"a{number:03}")
            bench.add(
                f"cpu{number}", mem=None, on=f"a{number:03}", schedulerName="other", requests={"cpu": "128"}
            )
        lure(bench, "z")
        bench.add("vip", mem="16Gi", priority=100, requests={"cpu": "4"})
        await patiently(bench, 3)
        assert bench.api.evicted == ["low-z"]


@pytest.mark.parametrize("lures", [64, 640])
async def test_nodes_that_no_figure_tells_apart_hide_no_other(lures: int) -> None:
    """Room could be made on each, but only one is not kept away from: each search goes on where the last has ended
    (binder H2)."""
    async with Bench() as bench:
        for number in range(lures):
            lure(bench, f"a{number:03}")
            bench.add(
                f"db{number}", mem=None, on=f"a{number:03}", schedulerName="other", labels={"app": "db"}
            )
        lure(bench, "z")
        bench.add("vip", mem="16Gi", priority=100, affinity=apart(term("db", HOST)))
        await patiently(bench, 100)
        assert bench.api.evicted == ["low-z"]


async def test_a_second_reason_that_goes_away_on_another_node_is_not_forgotten() -> None:
    """Short of memory, and in a zone with a pod that it keeps away from; that one is on another node (binder H3)."""
    async with Bench() as bench:
        lure(bench, "n1", labels={_ZONE: "a"})
        bench.node("n2", 1, labels={_ZONE: "a"})
        bench.add("db", mem=None, on="n2", schedulerName="other", labels={"app": "db"})
        bench.add("vip", mem="16Gi", priority=100, affinity=apart(term("db", _ZONE)))
        await patiently(bench, 300)
        assert bench.api.evicted == []
        bench.gone("db")
        await patiently(bench, 11)
        assert bench.api.evicted == ["low-n1"]


async def test_what_no_hint_foresees_is_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod's own time comes at the latest two minutes after its last try, and then all nodes are searched (binder
    H3)."""
    monkeypatch.setattr(DomainRule, "woken_by", lambda *_: False)
    async with Bench() as bench:
        lure(bench, "n1", labels={_ZONE: "a"})
        bench.node("n2", 1, labels={_ZONE: "a"})
        bench.add("db", mem=None, on="n2", schedulerName="other", labels={"app": "db"})
        bench.add("vip", mem="16Gi", priority=100, affinity=apart(term("db", _ZONE)))
        await patiently(bench, 300)
        bench.gone("db")
        await patiently(bench, 130)
        assert bench.api.evicted == ["low-n1"]


async def futile(bench: Bench, *, pods: int, lures: int) -> None:
    """Many who each ask for something else, and whom nobody's end can help."""
    for number in range(lures):
        lure(bench, f"a{number:03}")
        bench.add(f"db{number}", mem=None, on=f"a{number:03}", schedulerName="other", labels={"app": "db"})
    for number in range(pods):
        bench.add(
            f"vip{number}", mem=f"{10 * 1024 + number}Mi", priority=100, affinity=apart(term("db", HOST))
        )


async def test_searches_that_nothing_calls_for_share_one_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait in vain, what their own times cost is bounded (binder H2, H3)."""
    monkeypatch.setattr(room, "_REPEATED_A_SECOND", 2.0)
    monkeypatch.setattr(room, "_REPEATED_AT_ONCE", 10)
    asked = 0
    place = Questions.place

    def counted(self: Questions, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return place(self, *args)

    async with Bench() as bench:
        await futile(bench, pods=30, lures=5)
        await patiently(bench, 10)
        monkeypatch.setattr(Questions, "place", counted)
        await patiently(bench, 300)
    assert 100 < asked <= 2 * 300 + 10 + MOST_QUESTIONS


async def test_replicas_of_a_pod_whose_search_was_left_off_do_not_search_on_their_own() -> None:
    """Who asks the same is refused alike, as long as there is no news (binder H2)."""
    async with Bench() as bench:
        await futile(bench, pods=1, lures=80)
        await bench.step()
        asked = bench.scheduler.nominator._repeats
        bench.add(
            "copy",
            mem="10Gi",
            priority=100,
            affinity=apart(term("db", HOST)),
            annotations={KEYS.model_id: "model-vip0"},
        )
        before = len(bench.events.said)
        tries: list[str] = []
        decide = bench.scheduler.nominator.decide
        bench.scheduler.nominator.decide = lambda d: (tries.append(d.model.ref.name), decide(d))[1]  # type: ignore[method-assign]
        await bench.step(2)
        assert tries == []
        assert [name for name, *_ in bench.events.said[before:]] == ["copy"]
        assert asked.left() == 1024
