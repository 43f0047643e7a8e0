"""`berth why`: what it reads, what it prints for people and for programs, and how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.kube import paths
from berth.kube.errors import response_error
from berth.kube.times import micro_time
from berth.runtime.errors import CannotStart, ConfigError, Failed
from binder.cli import why
from tests.fakes.commands import BARE, add_node, call, pod_file, read_by_commands
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.reader import Reader

Json = dict[str, Any]
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Reader:
    return read_by_commands(monkeypatch)


@pytest.mark.parametrize("command", ["top", "why", "would-fit"])
async def test_an_api_server_that_refuses_is_named(command: str, api: Reader, tmp_path: Path) -> None:
    api.refused = {paths.NODES}
    api.objects[paths.pod("team", "p1")] = pod()
    argv = {"top": (), "why": ("p1", "-n", "team"), "would-fit": ("-f", pod_file(tmp_path, BARE))}[command]
    with pytest.raises(CannotStart, match=r"^API server http://api: 403 Forbidden"):
        await call(command, *argv)


async def answer_of(api: Reader, one: Json, capsys: pytest.CaptureFixture[str], *argv: str) -> Json:
    api.objects[paths.pod("team", one["metadata"]["name"])] = one
    await call("why", one["metadata"]["name"], "-n", "team", "-o", "json", *argv)
    said: Json = json.loads(capsys.readouterr().out)
    return said


async def test_why_judges_a_pending_pod_node_by_node(api: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(api, "n1", says=report(gpu("GPU-a", total=2 * GIB), gpu("GPU-b", index=1, other_use_bytes=None)))
    add_node(
        api, "n2", says=report(gpu("GPU-c", total=12 * GIB)), taints=[{"key": "k", "effect": "NoSchedule"}]
    )
    add_node(api, "n3", says=report(gpu("GPU-d", total=8 * GIB)))
    api.add(paths.PODS, pod("old", mem="6Gi", on="n3", choice=GpuChoice(GpuUuid("GPU-d"), 0, 6 * GIB)))
    said = await answer_of(api, pod("p1", mem="3Gi"), capsys)
    assert (said["stage"], said["fits"]) == ("pending", False)
    assert said["message"].startswith("team/p1 requests 3 GiB; 0/3 nodes: ")
    assert said["remedy"] == "would fit on n3, GPU 0, without team/old"
    first, second, third = said["nodes"]
    assert (first["node"], first["reason"]) == ("n1", "GPUMemoryInsufficient")
    assert first["gpus"] == [
        {
            "uuid": "GPU-a",
            "index": 0,
            "freeBytes": 2 * GIB,
            "reason": "GPUMemoryInsufficient",
            "shortBytes": GIB,
        },
        {"uuid": "GPU-b", "index": 1, "freeBytes": None, "reason": "GPUFactsUnknown", "shortBytes": None},
    ]
    assert (second["reason"], second["detail"]) == ("TaintNotTolerated", "k:NoSchedule")
    assert second["gpus"][0] == {
        "uuid": "GPU-c",
        "index": 0,
        "freeBytes": 12 * GIB,
        "reason": None,
        "shortBytes": None,
    }
    assert third["gpus"][0]["shortBytes"] == GIB
    await call("why", "p1", "-n", "team")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said["message"] in lines
    assert said["remedy"] in lines
    assert "NODE GPU FREE WHY NOT" in lines
    assert "n1 0 T4 2 GiB GPUMemoryInsufficient: 1 GiB short" in lines
    assert "n1 1 T4 ? GPUFactsUnknown" in lines
    assert "n2 - - TaintNotTolerated: k:NoSchedule" in lines  # its GPUs are not what refuses
    assert "n3 0 T4 2 GiB GPUMemoryInsufficient: 1 GiB short" in lines


async def test_why_says_where_a_pending_pod_fits_and_what_the_binder_said_last(
    api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report())
    add_node(api, "n2", says=report(gpu("GPU-b", total=GIB)))
    one = pod("p1", mem="3Gi")
    assert (await answer_of(api, one, capsys))["remedy"] == ""
    word = "0/2 nodes: 1 ExcludedAfterLoadFailure,\n1 GPUMemoryInsufficient"
    for status, told in (("True", ""), ("False", f"the binder reported last: {' '.join(word.split())}")):
        one["status"]["conditions"] = [{"type": "PodScheduled", "status": status, "message": word}]
        said = await answer_of(api, one, capsys)
        assert said["fits"]
        assert said["remedy"] == told
    assert (
        said["message"] == "team/p1 requests 3 GiB and fits on 1 of 2 nodes; the binder places it, if it runs"
    )
    assert [one["reason"] for one in said["nodes"]] == [None, "GPUMemoryInsufficient"]
    await call("why", "p1", "-n", "team")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "n1 0 T4 16 GiB fits" in lines


NOT_JUDGED: dict[str, tuple[Json, str]] = {
    "another scheduler's": (
        pod(schedulerName="kube"),
        "team/p1 is not the binder's: its schedulerName is kube, not trtis-scheduler",
    ),
    "another scheduler's with the annotation": (
        pod(schedulerName="kube", choice=CHOICE),
        "team/p1 is not the binder's: its schedulerName is kube, not trtis-scheduler; the annotation "
        f"{KEYS.gpu} that it carries gives it no GPU",
    ),
    "gated": (pod(schedulingGates=[{"name": "g"}]), "team/p1 waits for its schedulingGates"),
    "unreadable": (
        pod(mem="1.5"),
        f"team/p1 cannot be placed: container 'proxy': {KEYS.gpu_mem}: '1.5' is not a whole number of bytes",
    ),
    "not to be shared by its GPUs": (
        pod(mem="10Gi", annotations={KEYS.gpu_count: "3"}),
        f"team/p1 cannot be placed: limit {KEYS.gpu_mem} is the pod's total, 10737418240 bytes, which is no "
        f"whole number of bytes for each of 3 GPUs (annotation {KEYS.gpu_count}); the next that is: "
        "10737418242, or 10242Mi",
    ),
}


@pytest.mark.parametrize("case", NOT_JUDGED)
async def test_why_says_of_what_cannot_be_judged_what_is_wrong(
    case: str, api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    one, message = NOT_JUDGED[case]
    said = await answer_of(api, one, capsys)
    assert said == {"stage": "pending", "message": message, "fits": False, "remedy": "", "nodes": []}
    assert paths.NODES not in api.asked


async def test_why_tells_how_far_a_pod_is_that_has_a_node(
    api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report(models=(listed("p1"),)))
    one = pod("p1", on="n1", choice=CHOICE)
    one["status"]["conditions"] = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    ]
    said = await answer_of(api, one, capsys)
    assert (said["stage"], said["since"], said["details"]) == ("ready", "2026-01-01T00:00:00Z", [])
    assert said["times"] == {"created": "2026-01-01T00:00:00Z", "ready": "2026-01-01T00:00:00Z"}
    await call("why", "p1", "-n", "team")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("team/p1 is ready: its model is served on node n1, GPU 0, since 2026-01-01")
    assert "ready 2026-01-01T00:00:00Z" in lines
    api.refused = {paths.node("n1")}
    await call("why", "p1", "-n", "team")
    assert " - node n1 cannot be read: 403 Forbidden" in capsys.readouterr().out
    del one["status"]["conditions"], one["metadata"]["creationTimestamp"]
    assert (await answer_of(api, one, capsys))["since"] is None
    await call("why", "p1", "-n", "team")
    assert "PHASE" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"status": {"phase": "Failed"}}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}]
)
async def test_why_does_not_call_pending_what_ends_without_a_node(
    change: Json, api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    one = pod("p1")
    one["status"] |= change.get("status", {})
    one["metadata"] |= {key: text for key, text in change.items() if key != "status"}
    said = await answer_of(api, one, capsys)
    assert said["stage"] in ("ended", "unloading")
    assert api.asked == [paths.pod("team", "p1")]


async def test_why_of_a_pod_that_does_not_exist(api: Reader) -> None:
    with pytest.raises(Failed, match=r"^pod default/p1 does not exist; -n names another namespace$"):
        await call("why", "p1")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (("team/p1",), "the namespace goes with -n"),
        (("p1", "-n", "../x"), "is not the name"),
        (("P1",), "is not the name"),
        (("",), "is not the name"),
        (("a" * 254,), "is not the name"),
    ],
)
async def test_what_is_no_name_is_not_requested(argv: tuple[str, ...], hint: str, api: Reader) -> None:
    with pytest.raises(ConfigError, match=hint):
        await call("why", *argv)
    assert api.asked == []
    with pytest.raises(Failed):
        await call("why", "a" * 253)


async def test_a_pod_of_several_gpus_requests_its_total_and_a_share_of_it_on_each(
    api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    """ecosystem A4: a pod that takes 40 GiB is said to take them."""
    add_node(api, "n1", says=report(*(gpu(f"GPU-{i}", index=i) for i in range(4))))
    said = await answer_of(api, pod(mem="40Gi", annotations={KEYS.gpu_count: "4"}), capsys)
    assert said["fits"]
    assert said["message"].startswith("team/p1 requests 40 GiB (10 GiB on each of 4 GPUs) and fits on 1 of 1")
    said = await answer_of(api, pod(mem="68Gi", annotations={KEYS.gpu_count: "4"}), capsys)
    assert said["message"].startswith("team/p1 requests 68 GiB (17 GiB on each of 4 GPUs); 0/1 nodes: ")
    asked = "no GPU is large enough: 17 GiB asked on each, 16 GiB on the largest when empty"
    assert said["remedy"] == asked


# The heartbeats of agents, also of an earlier version.

LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/berth-agent-n1"
NEWER, EARLIER = LEASE.format("berth-system-nodes"), LEASE.format("berth-system")


class Server:
    """`leases`: minutes since each was renewed; None: it may not be read."""

    def __init__(self, leases: dict[str, int | None]) -> None:
        self.leases, self.host = leases, "https://server"

    async def get(self, path: str) -> dict[str, Any]:
        if path.endswith("/pods/p1"):
            return pod(on="n1")
        if path.endswith("/nodes/n1"):
            return node("n1", says=report())
        if path not in self.leases:
            raise response_error(404, "NotFound", path)
        if (minutes := self.leases[path]) is None:
            raise response_error(403, "Forbidden", path)
        renewed = datetime.now(UTC) - timedelta(minutes=minutes)
        return {"spec": {"renewTime": micro_time(renewed), "leaseDurationSeconds": 40}}


@pytest.mark.parametrize(
    ("leases", "beats"),
    [
        ({NEWER: 0}, True),
        ({EARLIER: 0}, True),
        ({NEWER: 0, EARLIER: 9}, True),
        ({NEWER: 9, EARLIER: 0}, True),
        ({NEWER: 0, EARLIER: None}, True),
        ({NEWER: 9, EARLIER: 9}, False),
        ({NEWER: 9, EARLIER: None}, False),
        ({}, False),
    ],
)
async def test_the_heartbeat_that_was_renewed_last_counts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    leases: dict[str, int | None],
    beats: bool,
) -> None:
    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Server]:
        yield Server(leases)

    monkeypatch.setattr(why, "open_client", opened)
    await why.main(why.WhyOptions(pod="p1", namespace="team", key_prefix=KEYS), asyncio.Event())
    assert ("heartbeat" not in capsys.readouterr().out) == beats
