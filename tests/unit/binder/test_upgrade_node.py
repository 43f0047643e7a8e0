"""`berth upgrade-node`: what is done to a node, in which order, and what is left where it fails."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.report import Failure, ModelState, NodeReport, TritonReport
from berth.kube import paths
from berth.kube.errors import KubeUnreachable, response_error
from berth.runtime.errors import CannotStart, Failed
from berth.runtime.options import parse_options
from binder.cli import upgrade_node
from binder.cli.upgrade_node import NodeUpgrade, UpgradeOptions
from tests.fakes.objects import GIB, KEYS, listed, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
APPS = "/apis/apps/v1/namespaces/berth-system"
NAMES = ("berth-server", "berth-agent")


class Machine:
    """The API server around one node whose DaemonSets, kubelet and agent do their work between two looks.
    `done`: the writes, in order."""

    host = "http://api"

    def __init__(self) -> None:
        self.node = node("n1")
        self.pods: dict[str, Json] = {}
        self.revision = dict.fromkeys(NAMES, "new")
        self.seen = dict.fromkeys(NAMES, True)  # their controller has seen the last change
        self.done: list[str] = []
        self.budget: dict[str, int] = {}  # evictions that are refused before one is allowed
        self.breaks: list[Exception] = []
        self.starts = dict.fromkeys(NAMES, True)  # new pods become ready
        self.verdict: dict[str, tuple[ModelState, Failure | None]] = {}
        self.beats = 0
        for name in NAMES:
            self.run(name, revision="old")

    def run(self, name: str, *, revision: str, ready: bool = True) -> None:
        made = pod(f"{name}-{revision}", mem=None, on="n1")
        made["metadata"] |= {
            "namespace": "berth-system",
            "annotations": {},
            "labels": {"controller-revision-hash": revision},
        }
        self.add(made, owner=("DaemonSet", name), ready=ready)

    def serve(
        self, uid: str, *, owner: tuple[str, str] | None = ("ReplicaSet", "rs"), ready: bool = True
    ) -> None:
        self.add(pod(uid, on="n1", choice=CHOICE, phase="Running"), owner=owner, ready=ready)

    def add(self, made: Json, *, owner: tuple[str, str] | None, ready: bool) -> None:
        if owner is not None:
            kind, name = owner
            made["metadata"]["ownerReferences"] = [
                {"kind": kind, "name": name, "uid": name, "controller": True}
            ]
        made["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
        self.pods[made["metadata"]["name"]] = made

    @property
    def cordoned(self) -> bool:
        return bool(self.node["spec"]["unschedulable"])

    @asynccontextmanager
    async def open(self, kubeconfig: str | None) -> AsyncIterator["Machine"]:
        yield self

    async def get(self, path: str, **params: str) -> Json:
        if self.breaks:
            raise self.breaks.pop(0)
        if path == paths.node("n1"):
            self._time_goes_on()
            return copy.deepcopy(self.node)
        if path == paths.PODS:
            assert params == {"fieldSelector": "spec.nodeName=n1"}
            return {"items": copy.deepcopy(list(self.pods.values()))}
        if path == paths.lease("berth-system-nodes", "berth-agent-n1"):
            return {"metadata": {}, "spec": {"renewTime": str(self.beats)}}
        kind, _, name = path.removeprefix(f"{APPS}/").partition("/")
        if kind == "daemonsets" and name in NAMES:
            return {
                "metadata": {"uid": name, "generation": 2},
                "spec": {"selector": {"matchLabels": {"name": name}}},
                "status": {"observedGeneration": 2 if self.seen[name] else 1},
            }
        if kind == "controllerrevisions":
            return {"items": list(self._revisions(params["labelSelector"].removeprefix("name=")))}
        raise response_error(404, "NotFound", f"{path} not found")

    def _revisions(self, name: str) -> Any:
        for number, label in ((7, self.revision[name]), (3, "old")):
            meta = {"ownerReferences": [{"uid": name}], "labels": {"controller-revision-hash": label}}
            yield {"metadata": meta, "revision": number}
        stranger = {"ownerReferences": [{"uid": "other"}], "labels": {"controller-revision-hash": "x"}}
        yield {"metadata": stranger, "revision": 99}

    def _time_goes_on(self) -> None:
        for name, there in list(self.pods.items()):
            if "deletionTimestamp" in there["metadata"]:
                del self.pods[name]
                owner = (there["metadata"].get("ownerReferences") or [{"name": ""}])[0]["name"]
                if owner in NAMES:
                    self.run(owner, revision=self.revision[owner], ready=self.starts[owner])
        self.beats += 1
        self.node["metadata"]["annotations"][KEYS.report] = self._report().encode()

    def _report(self) -> NodeReport:
        models = []
        for name, there in self.pods.items():
            if KEYS.gpu in there["metadata"]["annotations"]:
                state, failure = self.verdict.get(name, (ModelState.READY, None))
                models.append(replace(listed(name), state=state, failure=failure, reason="because"))
        up = any(name.startswith("berth-server") for name in self.pods)
        return report(models=tuple(models), triton=TritonReport(up, "2.51.0"))

    async def patch(self, path: str, body: Json) -> Json:
        assert path == paths.node("n1")
        self.node["spec"]["unschedulable"] = bool(body["spec"]["unschedulable"])
        for key, value in body["metadata"]["annotations"].items():
            self.node["metadata"]["annotations"][key] = value
            if value is None:
                del self.node["metadata"]["annotations"][key]
        self.done.append("cordon" if self.cordoned else "uncordon")
        return {}

    async def create(self, path: str, body: Json) -> Json:
        assert path.endswith("/eviction")
        name = body["metadata"]["name"]
        assert body["deleteOptions"]["preconditions"]["uid"] == self.pods[name]["metadata"]["uid"]
        if self.budget.get(name, 0) > 0:
            self.budget[name] -= 1
            raise response_error(429, "TooManyRequests", "it would violate the budget")
        self._end(name)
        self.done.append(f"evict {name}")
        return {}

    async def delete(self, path: str, *, uid: str) -> Json:
        name = path.rpartition("/")[2]
        assert uid == self.pods[name]["metadata"]["uid"]
        self._end(name)
        self.done.append(f"delete {name}")
        return {}

    def _end(self, name: str) -> None:
        self.pods[name]["metadata"]["deletionTimestamp"] = "now"


@pytest.fixture
def machine() -> Machine:
    return Machine()


def options(*argv: str) -> UpgradeOptions:
    return parse_options(UpgradeOptions, process="upgrade-node", summary="", argv=["n1", *argv], environ={})


async def upgrade(machine: Machine, *argv: str, looks: int = 60) -> tuple[NodeUpgrade, list[str]]:
    """At most `looks` looks, without pauses. Raises what it raises, with the lines that it said as a note."""
    said: list[str] = []
    made = NodeUpgrade(machine, options(*argv), say=said.append, pause_seconds=0.0)  # type: ignore[arg-type]
    stop = asyncio.Event()
    machine_get, left = machine.get, looks

    async def counted(path: str, **params: str) -> Json:
        nonlocal left
        left -= path == paths.node("n1")
        if left == 0:
            stop.set()
        return await machine_get(path, **params)

    machine.get = counted  # type: ignore[method-assign]
    try:
        await made.run(stop)
    except Failed as error:
        error.add_note("\n".join(said))
        raise
    return made, said


DELETES = ["delete berth-server-old", "delete berth-agent-old"]


async def test_models_go_first_and_the_node_is_open_again_at_the_end(machine: Machine) -> None:
    machine.serve("p1")
    machine.serve("p2")
    made, said = await upgrade(machine)
    assert machine.done == ["cordon", "evict p1", "evict p2", *DELETES, "uncordon"]
    assert not machine.cordoned
    assert KEYS.cordoned_by not in machine.node["metadata"]["annotations"]
    assert (made.record.done, made.record.evicted) == (True, ["team/p1", "team/p2"])
    assert said[0] == "cordoned n1"
    assert said[-1] == "n1 is up to date"


async def test_an_agent_alone_is_replaced_under_models_that_go_on(machine: Machine) -> None:
    machine.serve("p1")
    await upgrade(machine, "--agent-only")
    assert machine.done == ["delete berth-agent-old"]
    assert "p1" in machine.pods


async def test_where_triton_is_up_to_date_no_model_has_to_leave(machine: Machine) -> None:
    machine.serve("p1")
    machine.revision["berth-server"] = "old"
    await upgrade(machine)
    assert machine.done == ["delete berth-agent-old"]


async def test_where_all_is_up_to_date_nothing_is_done(machine: Machine) -> None:
    machine.serve("p1")
    machine.revision = dict.fromkeys(NAMES, "old")
    await upgrade(machine)
    assert machine.done == []


async def test_a_node_that_was_cordoned_before_stays_so(machine: Machine) -> None:
    machine.node["spec"]["unschedulable"] = True
    await upgrade(machine)
    assert machine.done == DELETES
    assert machine.cordoned


async def test_a_budget_is_asked_until_it_allows(machine: Machine) -> None:
    machine.serve("p1")
    machine.budget["p1"] = 3
    _, said = await upgrade(machine)
    assert machine.done == ["cordon", "evict p1", *DELETES, "uncordon"]
    (told,) = [line for line in said if "budget" in line]
    assert told.startswith("waiting for team/p1 to go; leave to evict team/p1 (429")


async def test_what_comes_after_a_budget_that_never_allows(machine: Machine) -> None:
    machine.serve("p1")
    machine.serve("p2")
    machine.budget["p2"] = 10**6
    with pytest.raises(Failed) as failed:
        await upgrade(machine, looks=20)
    assert machine.done == ["cordon", "evict p1"]
    for part in (
        "n1: stopped.",
        "team/p2 to go",
        "violate the budget",
        "evicted team/p1",
        "n1 stays cordoned: run it again to go on, or give up with kubectl uncordon n1",
    ):
        assert part in str(failed.value)


async def test_it_ends_with_its_time(machine: Machine) -> None:
    machine.starts["berth-agent"] = False
    with pytest.raises(Failed, match=r"not done within 1 s\. It waited for a ready pod of berth-agent"):
        await upgrade(machine, "--timeout=1", looks=10**9)


async def test_run_again_it_goes_on_and_opens_the_node_that_it_has_closed(machine: Machine) -> None:
    machine.serve("p1")
    machine.starts["berth-server"] = False
    with pytest.raises(Failed, match="a ready pod of berth-server"):
        await upgrade(machine, looks=12)
    assert machine.cordoned
    machine.pods["berth-server-new"]["status"]["conditions"][0]["status"] = "True"
    machine.done.clear()
    await upgrade(machine)
    assert machine.done == ["uncordon"]


@pytest.mark.parametrize("owner", [None, ("DaemonSet", "models")])
async def test_a_pod_that_nothing_makes_elsewhere_stays_and_is_waited_for(
    machine: Machine, owner: tuple[str, str] | None
) -> None:
    machine.serve("p1", owner=owner)
    machine.verdict["p1"] = (ModelState.LOADING, None)
    with pytest.raises(Failed, match=r"waited for the model of team/p1 \(loading\)"):
        await upgrade(machine, looks=20)
    assert machine.done == ["cordon", *DELETES]
    del machine.verdict["p1"]
    machine.pods["p1"]["status"]["conditions"][0]["status"] = "False"
    with pytest.raises(Failed, match=r"waited for the model of team/p1 \(ready\)"):
        await upgrade(machine, looks=20)
    machine.pods["p1"]["status"]["conditions"][0]["status"] = "True"
    made, said = await upgrade(machine)
    assert machine.done == ["cordon", *DELETES, "uncordon"]
    assert made.record.stayed == ["team/p1"]
    assert said[0].startswith("team/p1 stays")


async def test_a_model_that_the_new_triton_does_not_take_is_a_failure(machine: Machine) -> None:
    machine.serve("p1", owner=None)
    machine.verdict["p1"] = (ModelState.FAILED, Failure.INVALID_MODEL)
    with pytest.raises(Failed, match="the model of team/p1, which served before, does not any more: because"):
        await upgrade(machine)
    assert machine.cordoned


async def test_a_load_that_is_tried_again_is_waited_for(machine: Machine) -> None:
    machine.serve("p1", owner=None)
    machine.verdict["p1"] = (ModelState.FAILED, Failure.TRANSIENT)
    with pytest.raises(Failed, match=r"waited for the model of team/p1 \(failed\)"):
        await upgrade(machine, looks=20)


@pytest.mark.parametrize("state", [ModelState.FAILED, ModelState.LOST])
async def test_a_model_that_did_not_serve_before_holds_nothing_up(
    machine: Machine, state: ModelState
) -> None:
    machine.serve("p1", owner=None, ready=False)
    machine.verdict["p1"] = (state, Failure.INVALID_MODEL)
    await upgrade(machine)
    assert machine.done[-1] == "uncordon"


async def test_nor_does_a_pod_whose_loader_fails_again_and_again(machine: Machine) -> None:
    machine.serve("p1", owner=None, ready=False)
    machine.verdict["p1"] = (ModelState.PENDING, None)
    machine.pods["p1"]["status"]["initContainerStatuses"] = [{"restartCount": 2, "ready": False}]
    await upgrade(machine)
    assert machine.done[-1] == "uncordon"


async def test_a_model_that_was_placed_meanwhile_goes_too(machine: Machine) -> None:
    machine.serve("p1")
    machine.budget["p1"] = 2
    patch = machine.patch

    async def and_one_comes(path: str, body: Json) -> Json:
        if "late" not in machine.pods and "evict late" not in machine.done:
            machine.serve("late")
        return await patch(path, body)

    machine.patch = and_one_comes  # type: ignore[method-assign]
    await upgrade(machine)
    assert machine.done == ["cordon", "evict late", "evict p1", *DELETES, "uncordon"]


async def test_pods_that_are_no_models_and_models_that_have_ended_are_let_be(machine: Machine) -> None:
    machine.add(pod("other", mem=None, on="n1"), owner=("ReplicaSet", "rs"), ready=True)
    machine.serve("ended")
    machine.pods["ended"]["status"]["phase"] = "Succeeded"
    await upgrade(machine)
    assert machine.done == ["cordon", *DELETES, "uncordon"]


@pytest.mark.parametrize("revision", ["old", "new"])
async def test_a_tenants_daemonset_of_the_same_name_is_a_tenants(machine: Machine, revision: str) -> None:
    """It is not deleted, and does not stand in for the one that is awaited."""
    machine.starts["berth-server"] = False
    machine.run("berth-server", revision=revision)
    twin = machine.pods.pop(f"berth-server-{revision}")
    machine.run("berth-server", revision="old")
    twin["metadata"] |= {"name": "twin", "uid": "twin", "namespace": "team"}
    machine.pods["twin"] = twin
    with pytest.raises(Failed, match=r"It waited for a ready pod of berth-server\."):
        await upgrade(machine)
    assert machine.done == ["cordon", *DELETES]


async def test_a_change_that_the_controller_has_not_seen_is_waited_for(machine: Machine) -> None:
    """Or the old pods would pass for new ones."""
    machine.seen["berth-server"] = False
    machine.revision["berth-server"] = "old"
    with pytest.raises(Failed, match="the controller to see the change of DaemonSet berth-server"):
        await upgrade(machine, looks=5)
    assert machine.done == []


async def test_triton_and_the_agent_are_heard_before_the_node_is_opened(machine: Machine) -> None:
    machine.beats = -(10**6)
    go_on = machine._time_goes_on

    def silent() -> None:
        go_on()
        machine.beats = 0

    machine._time_goes_on = silent  # type: ignore[method-assign]
    with pytest.raises(Failed, match="waited for the agent's heartbeat"):
        await upgrade(machine, looks=20)
    assert machine.cordoned


async def test_an_api_server_that_is_away_for_a_while_is_waited_for(machine: Machine) -> None:
    made = NodeUpgrade(machine, options(), say=lambda line: None, pause_seconds=0.0)  # type: ignore[arg-type]
    begun = made._begin

    async def then_it_goes_away() -> Any:
        upgrade = await begun()
        machine.breaks += [
            KubeUnreachable("refused"),
            *(response_error(status, "", "later") for status in (409, 429, 500)),
            response_error(503, "", "starting"),
        ]
        return upgrade

    made._begin = then_it_goes_away  # type: ignore[method-assign]
    await made.run(asyncio.Event())
    assert machine.done == ["cordon", *DELETES, "uncordon"]


async def test_without_an_api_server_it_does_not_begin(machine: Machine) -> None:
    machine.breaks = [KubeUnreachable("refused")]
    with pytest.raises(CannotStart, match="API server http://api: refused"):
        await upgrade(machine)


async def test_whoever_may_not_is_told_so_and_what_is_left(machine: Machine) -> None:
    machine.serve("p1")

    async def denied(path: str, body: Json) -> Json:
        raise response_error(403, "Forbidden", "you may not evict")

    machine.create = denied  # type: ignore[method-assign]
    with pytest.raises(Failed, match=r"you may not evict\..* n1 stays cordoned"):
        await upgrade(machine)


async def test_a_node_that_is_none(machine: Machine) -> None:
    machine.breaks = [response_error(404, "NotFound", 'nodes "n1" not found')]
    with pytest.raises(Failed, match='nodes "n1" not found; nothing was done'):
        await upgrade(machine)


async def test_a_node_without_berth(machine: Machine) -> None:
    machine.pods.clear()
    with pytest.raises(Failed, match="no pod of berth-server or berth-agent is on n1"):
        await upgrade(machine)
    assert machine.done == []


async def test_programs_get_json_however_it_ends(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.serve("p1", owner=None)
    monkeypatch.setattr(upgrade_node, "open_client", machine.open)
    monkeypatch.setattr(upgrade_node, "_PAUSE_SECONDS", 0.0)
    machine.verdict["p1"] = (ModelState.FAILED, Failure.QUARANTINED)
    with pytest.raises(Failed):
        await upgrade_node.main(options("-o", "json"), asyncio.Event())
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "node": "n1",
        "done": False,
        "cordoned": True,
        "evicted": [],
        "stayed": ["team/p1"],
        "replaced": ["berth-system/berth-server-old", "berth-system/berth-agent-old"],
        "waitingFor": [],
    }
    assert "cordoned n1" in shown.err
    del machine.verdict["p1"]
    await upgrade_node.main(options("-o", "json"), asyncio.Event())
    assert json.loads(capsys.readouterr().out)["done"] is True
