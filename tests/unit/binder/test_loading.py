"""Models are loaded one after another on a GPU: a pod whose load would wait goes where it need not (autoscaling D1)."""

from collections import Counter

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.report import ModelReport, ModelState
from berth.kube.informer import ChangeKind
from binder.cache.loading import EXPECTED_SECONDS, ExpectedLoads
from binder.pod.demand import parse_demand
from tests.fakes.binder import PLENTY, Bench
from tests.fakes.objects import GIB, KEYS, Json, gpu, listed, node, pod, report
from tests.fakes.values import replace

UNDER_WAY = (ModelState.STAGED, ModelState.LOADING)
NOT_TO_COME = (ModelState.READY, ModelState.FAILED, ModelState.LOST, ModelState.UNLOADING)


class Loads(Bench):
    """Nodes of one or more GPUs of 80 GiB, and what their agents report."""

    def __init__(self) -> None:
        super().__init__(strategy="least-fragmentation")

    def says(self, name: str, *models: ModelReport, gpus: int = 1) -> None:
        there = [gpu(f"{name}-{slot}", total=80 * GIB, index=slot) for slot in range(gpus)]
        self.tell("nodes", node(name, says=report(*there, models=models), allocatable=PLENTY))
        self.scheduler.cluster.decider.table.beat(NodeName(name), 1e9)

    def on(self, uid: str) -> str:
        reservation = self.scheduler.state.reservation_of(PodUid(uid))
        return "" if reservation is None else str(reservation.node)

    def gpu_of(self, uid: str) -> str:
        reservation = self.scheduler.state.reservation_of(PodUid(uid))
        return "" if reservation is None else ",".join(sorted(reservation.gpus))

    async def places(self, uid: str, **asks: object) -> str:
        """The node that a new pod is given."""
        self.add(uid, **{"mem": "1Gi", **asks})
        await self.step(3)
        return self.on(uid)


def model(uid: str, name: str, state: ModelState, *, slot: int = 0) -> ModelReport:
    return replace(listed(uid, on=f"{name}-{slot}"), state=state)


async def test_twenty_at_once_are_spread_over_five_idle_gpus() -> None:
    """Sixteen of them were on the first GPU, where they were loaded one after another."""
    async with Loads() as bench:
        for number in range(1, 6):
            bench.says(f"gpu-{number}")
        for number in range(20):
            bench.add(f"p{number}", mem="1Gi")
        await bench.until_quiet()
        assert Counter(bench.on(f"p{number}") for number in range(20)) == {f"gpu-{n}": 4 for n in range(1, 6)}


@pytest.mark.parametrize("state", UNDER_WAY)
async def test_nobody_comes_behind_a_long_load_while_other_gpus_are_idle(state: ModelState) -> None:
    """One model that loads for 40 s, then four quick ones: all five were on gpu-1."""
    async with Loads() as bench:
        for number in range(1, 6):
            bench.says(f"gpu-{number}")
        assert await bench.places("slow") == "gpu-1"
        bench.says("gpu-1", model("slow", "gpu-1", state))
        bench.now += 30  # it is loaded still
        for number in range(4):
            bench.add(f"quick{number}", mem="1Gi")
        await bench.until_quiet()
        assert {bench.on(f"quick{number}") for number in range(4)} == {f"gpu-{n}" for n in range(2, 6)}


@pytest.mark.parametrize("state", NOT_TO_COME)
async def test_where_no_load_is_under_way_models_are_packed_as_ever(state: ModelState) -> None:
    async with Loads() as bench:
        for number in range(1, 4):
            bench.says(f"gpu-{number}")
        for number in range(5):
            assert await bench.places(f"p{number}") == "gpu-1"
            there = [model(f"p{n}", "gpu-1", state) for n in range(number + 1)]
            bench.says("gpu-1", *there)


async def test_a_pod_that_is_ready_before_the_report_says_so_is_waited_for_no_more() -> None:
    async with Loads() as bench:
        bench.says("gpu-1")
        bench.says("gpu-2")
        assert await bench.places("p1") == "gpu-1"
        bench.api.pods["p1"]["status"]["conditions"] = [{"type": "Initialized", "status": "True"}]
        bench.tell("pods", bench.api.pods["p1"])
        assert await bench.places("p2") == "gpu-1"


async def test_a_binder_that_starts_anew_expects_the_loads_of_pods_that_are_not_initialized() -> None:
    async with Loads() as bench:
        bench.says("gpu-1")
        bench.says("gpu-2")
        old = bench.resident("old", "gpu-1", 1)
        assert await bench.places("p1") == "gpu-2"
        old["status"]["conditions"] = [{"type": "Initialized", "status": "True"}]
        bench.tell("pods", old)
        old["metadata"] |= {"uid": "older", "name": "older"}
        bench.tell("pods", old)
        assert await bench.places("p2") == "gpu-1"


async def test_a_pod_whose_files_do_not_come_keeps_nobody_away_for_long() -> None:
    async with Loads() as bench:
        bench.says("gpu-1")
        bench.says("gpu-2")
        assert await bench.places("p1") == "gpu-1"
        bench.says("gpu-1", model("p1", "gpu-1", ModelState.PENDING))
        bench.now += EXPECTED_SECONDS - 1
        assert await bench.places("p2") == "gpu-2"
        bench.gone("p2")
        bench.now += 1
        assert await bench.places("p3") == "gpu-1"
        bench.gone("p3")
        bench.says("gpu-1", model("p1", "gpu-1", ModelState.STAGED))  # they have come after all
        assert await bench.places("p4") == "gpu-2"


async def test_a_pod_that_is_gone_keeps_nobody_away() -> None:
    async with Loads() as bench:
        bench.says("gpu-1")
        bench.says("gpu-2")
        assert await bench.places("p1") == "gpu-1"
        bench.gone("p1")
        assert await bench.places("p2") == "gpu-1"


async def test_within_a_node_the_gpu_is_chosen_by_it_too() -> None:
    async with Loads() as bench:
        bench.says("n1", gpus=3)
        found = [await bench.places(f"p{number}") and bench.gpu_of(f"p{number}") for number in range(3)]
        assert sorted(found) == ["n1-0", "n1-1", "n1-2"]


async def test_of_several_gpus_the_longest_wait_counts() -> None:
    async with Loads() as bench:
        bench.says("n1", model("busy", "n1", ModelState.LOADING), gpus=2)
        bench.says("n2", gpus=3)
        bench.says("n2", model("other", "n2", ModelState.LOADING, slot=1), gpus=3)
        both: Json = {KEYS.gpu_count: "2"}
        assert await bench.places("p1", annotations=both) == "n2"
        assert bench.gpu_of("p1") == "n2-0,n2-2"


async def test_a_load_counts_most_for_a_pod_that_requests_may_wait_for() -> None:
    """The first replica of a model. Any other one is placed by what its place is worth, before that."""
    async with Loads() as bench:
        bench.says("n1", model("busy", "n1", ModelState.LOADING))
        decider = bench.scheduler.cluster.decider
        first = parse_demand(pod("first"), KEYS)
        awaited = decider.scores(first)[0]
        bench.resident("there", "n1", 0, annotations={KEYS.model_id: "model-first"})
        another = decider.scores(first)[0]
        assert another - awaited == pytest.approx(0.9 - 0.1)  # two loads by then


@pytest.mark.parametrize(("owner", "cost"), [("rs-1", 0.1), ("rs-2", 1.0), (None, 1.0)])
async def test_without_an_id_a_model_is_known_by_its_controller(owner: str | None, cost: float) -> None:
    async with Loads() as bench:
        bench.says("n1")
        mark: Json = {KEYS.model_id: None}
        there = pod("there", on="n1", choice=GpuChoice(GpuUuid("n1-0"), 0, 0), annotations=mark, mem=None)
        there["metadata"]["ownerReferences"] = [{"uid": "rs-1", "controller": True}]
        asks = pod("asks", annotations=mark)
        asks["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}] if owner else []
        demand, decider = parse_demand(asks, KEYS), bench.scheduler.cluster.decider
        idle = decider.scores(demand)[0]
        bench.tell("pods", there)
        assert idle - decider.scores(demand)[0] == pytest.approx(cost)


async def test_a_simple_strategy_looks_at_memory_alone() -> None:
    async with Bench(strategy="binpack") as bench:
        bench.node("n1", 80)
        bench.node("n2", 80)
        for number in range(3):
            bench.add(f"p{number}", mem="1Gi")
        await bench.until_quiet()
        nodes = {bench.scheduler.state.reservation_of(PodUid(f"p{n}")).node for n in range(3)}  # type: ignore[union-attr]
        assert len(nodes) == 1


async def test_a_node_that_is_gone_and_comes_back_has_no_loads() -> None:
    async with Loads() as bench:
        bench.says("gpu-1", model("busy", "gpu-1", ModelState.LOADING))
        bench.says("gpu-2")
        assert await bench.places("p1") == "gpu-2"
        bench.tell("nodes", node("gpu-1"), ChangeKind.GONE)
        bench.says("gpu-1")
        assert await bench.places("p2") == "gpu-1"


def test_a_pod_is_expected_from_its_first_place_on_and_once() -> None:
    loads, uid = ExpectedLoads(), PodUid("p")
    loads.note(uid, 0.0)
    loads.note(PodUid("q"), 1.0)
    loads.note(uid, EXPECTED_SECONDS - 1)  # it is seen bound
    assert loads.take_overdue(EXPECTED_SECONDS - 0.1) == []
    assert loads.take_overdue(EXPECTED_SECONDS) == [uid]
    assert (loads.forget(uid), loads.forget(PodUid("q")), loads.forget(PodUid("q"))) == (False, True, False)


async def test_gpus_that_come_later_have_no_loads() -> None:
    async with Loads() as bench:
        bench.says("gpu-1", model("p", "gpu-1", ModelState.LOADING))
        table = bench.scheduler.cluster.decider.table
        await bench.until_quiet()
        bench.scheduler.cluster.decider.refresh()
        assert table.loads.sum() == 1
        for number in range(2, 40):
            bench.says(f"gpu-{number}", gpus=8)
        bench.scheduler.cluster.decider.refresh()
        assert table.loads.sum() == 1
