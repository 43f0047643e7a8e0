"""`berth why` as a command: what it reads, what it prints, how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.wait_reason import WaitReason
from berth.kube.times import micro_time, utc_now
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.runtime.options import parse_options
from binder.cli.why import WhyOptions, main
from tests.fakes.objects import GIB, KEYS, listed, node, pod, report
from tests.fakes.web import serving

Json = dict[str, Any]
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
POD, NODE = "/api/v1/namespaces/team/pods/p1", "/api/v1/nodes/n1"
# Where the agent writes it.
LEASE = "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases/berth-agent-n1"


class Api:
    """Holds objects by path; `denied` paths answer 403, what it does not hold 404, lists are empty."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.denied: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        if path in self.denied:
            return self._status(403, "Forbidden")
        if path in self.objects:
            return web.json_response(self.objects[path])
        if path.rpartition("/")[2] in {"pods", "nodes", "leases", "namespaces", "persistentvolumes"}:
            return web.json_response({"items": [], "metadata": {}})
        return self._status(404, "NotFound")

    def _status(self, code: int, reason: str) -> web.Response:
        return web.json_response({"code": code, "reason": reason, "message": reason.lower()}, status=code)


@pytest.fixture
def api() -> Api:
    """One that holds a pod which serves."""
    made = Api()
    served = pod(on="n1", choice=CHOICE)
    served["status"] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }
    made.objects[POD] = served
    made.objects[NODE] = node(says=report(models=(listed("p1"),)))
    made.objects[LEASE] = {"spec": {"renewTime": micro_time(utc_now()), "leaseDurationSeconds": 40}}
    return made


@pytest.fixture
async def kubeconfig(api: Api, tmp_path: Path) -> AsyncIterator[str]:
    async with serving(api.answer) as url:
        path = tmp_path / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": url}}],
                    "users": [{"name": "test", "user": {}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                }
            )
        )
        yield str(path)


async def why(kubeconfig: str, *argv: str) -> None:
    arguments = ["--kubeconfig", kubeconfig, *argv]
    options = parse_options(WhyOptions, process="why", summary="", argv=arguments, environ={})
    await main(options, asyncio.Event())


async def test_a_pod_that_serves(kubeconfig: str, capsys: pytest.CaptureFixture[str]) -> None:
    await why(kubeconfig, "p1", "-n", "team", "-o", "json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["stage"] == "ready"
    assert answer["message"].startswith("team/p1 is ready: its model is served on node n1, GPU 0, since")
    assert (answer["since"], answer["details"]) == ("2026-01-01T00:00:00Z", [])
    await why(kubeconfig, "p1", "-n", "team")
    assert answer["message"] in capsys.readouterr().out


async def test_who_may_not_read_nodes_learns_what_the_pod_tells(
    api: Api, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.denied = {NODE, LEASE}
    await why(kubeconfig, "p1", "-n", "team")
    out = capsys.readouterr().out
    assert "is ready" in out
    assert "node n1 cannot be read: 403 Forbidden" in out


async def test_a_node_that_is_gone(api: Api, kubeconfig: str, capsys: pytest.CaptureFixture[str]) -> None:
    del api.objects[NODE], api.objects[LEASE]
    await why(kubeconfig, "p1", "-n", "team")
    out = capsys.readouterr().out
    assert "node n1 does not exist any more" in out
    assert "no heartbeat of Berth's agent" in out


async def test_a_pod_that_does_not_exist(kubeconfig: str) -> None:
    with pytest.raises(Failed, match=r"^pod default/p1 does not exist; -n names another namespace$"):
        await why(kubeconfig, "p1")


async def test_an_api_server_that_refuses(api: Api, kubeconfig: str) -> None:
    api.denied = {POD}
    with pytest.raises(CannotStart, match="403 Forbidden"):
        await why(kubeconfig, "p1", "-n", "team")


@pytest.mark.parametrize("argv", [("team/p1",), ("p1", "-n", "../x"), ("P1",), ("",)])
async def test_what_is_no_name_is_not_requested(kubeconfig: str, argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is not the name of an object"):
        await why(kubeconfig, *argv)


async def test_another_scheduler_s_pod_that_carries_the_annotation(
    api: Api, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.objects[POD] = pod(choice=CHOICE, schedulerName="default-scheduler")
    await why(kubeconfig, "p1", "-n", "team", "-o", "json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["stage"] == "pending"
    assert "schedulerName is default-scheduler, not trtis-scheduler" in answer["message"]
    assert f"the annotation {KEYS.gpu} that it carries gives it no GPU" in answer["message"]


async def test_a_list_that_is_not_there_is_not_taken_for_the_pod(api: Api, kubeconfig: str) -> None:
    """A cluster without some API group: it is not the pod that does not exist."""
    api.objects[POD] = pod()
    with pytest.raises(CannotStart, match="404"):
        await why(kubeconfig, "p1", "-n", "team")


@pytest.fixture
def pending(api: Api) -> Json:
    """A pod that waits, in a cluster of one node."""
    for path in (
        "/api/v1/persistentvolumeclaims",
        "/apis/storage.k8s.io/v1/storageclasses",
        "/apis/policy/v1/poddisruptionbudgets",
    ):
        api.objects[path] = {"items": []}
    api.objects["/api/v1/nodes"] = {"items": [node(says=report())]}
    waits = api.objects[POD] = pod()
    return waits


@pytest.mark.usefixtures("pending")
async def test_a_pending_pod_is_judged_node_by_node(
    kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await why(kubeconfig, "p1", "-n", "team")
    assert "0/1 nodes: 1 StaleNodeFacts" in capsys.readouterr().out


async def test_what_only_the_binder_knows_is_its_last_word(
    api: Api, pending: Json, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that is left out after a failed load looks as if it fitted."""
    lease = {"metadata": {"name": "berth-agent-n1"}, **api.objects[LEASE]}
    api.objects[LEASE.rpartition("/")[0]] = {"items": [lease]}
    word = "0/1 nodes: 1 ExcludedAfterLoadFailure"
    pending["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": word}]
    await why(kubeconfig, "p1", "-n", "team")
    out = capsys.readouterr().out
    assert "fits on 1 of 1 nodes" in out
    assert f"the binder reported last: {word}" in out


@pytest.mark.parametrize("reason", [one.value for one in WaitReason])
async def test_what_cluster_autoscalers_are_told_is_shown(
    reason: str, api: Api, pending: Json, kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The binder's own verdict: it knows kinds of nodes that are not there any more (ecosystem A1)."""
    pending["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": reason}]
    await why(kubeconfig, "p1", "-n", "team")
    assert f"cluster autoscalers read {reason}: " in capsys.readouterr().out
    await why(kubeconfig, "p1", "-n", "team", "-o", "json")
    assert json.loads(capsys.readouterr().out)["reason"] == reason
