"""`berth top`, `why` and `would-fit`: what they read, what they print for people and for programs, how they end."""

import asyncio
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.keys import agent_lease_namespace
from berth.contract.report import ModelState, TritonReport
from berth.kube import paths
from berth.kube.command import OutputOptions
from berth.kube.times import micro_time
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.runtime.options import parse_options
from binder.cli import top, why, would_fit
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.reader import Reader
from tests.fakes.values import replace

Json = dict[str, Any]
COMMANDS = {
    "top": (OutputOptions, top.main),
    "why": (why.WhyOptions, why.main),
    "would-fit": (would_fit.WouldFitOptions, would_fit.main),
}
LEASES = paths.leases(agent_lease_namespace("berth-system"))
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Reader:
    made = Reader()
    for module in (top, why, would_fit):
        monkeypatch.setattr(module, "open_client", made.open)
    return made


async def call(command: str, *argv: str) -> None:
    kind, main = COMMANDS[command]
    await main(parse_options(kind, process=command, summary="", argv=argv, environ={}), asyncio.Event())  # type: ignore[operator]


def add_node(api: Reader, name: str, *, beats: bool = True, **more: Any) -> None:
    api.add(paths.NODES, node(name, **more))
    if beats:
        spec = {"renewTime": micro_time(datetime.now(UTC)), "leaseDurationSeconds": 40}
        lease = {"metadata": {"name": f"berth-agent-{name}"}, "spec": spec}
        api.add(LEASES, lease)


# --- top


@pytest.fixture
def machine(api: Reader) -> Reader:
    """n1 serves a model of 4 GiB that takes 5 and has lost a GPU; n2's agent is silent; n3's report cannot be
    read; n4 has none, but a model pod; n5 has no GPUs, n6 no Triton; n7 is nobody's."""
    two = report(
        gpu("GPU-a", other_use_bytes=GIB, headroom_bytes=2 * GIB),
        gpu("GPU-b", index=1, total=None, healthy=False, reason="XID 79"),
        models=(
            replace(listed("p1", requested=4 * GIB, measured=5 * GIB), other_gpus=(GpuUuid("GPU-b"),)),
            replace(
                listed("p2", on=None),
                pod_name="",
                model_name=None,
                state=ModelState.FAILED,
                reason="no memory",
            ),
        ),
    )
    add_node(api, "n1", says=two)
    add_node(api, "n2", says=report(gpu("GPU-c")), beats=False)
    add_node(api, "n3", says="{")
    add_node(api, "n4")
    add_node(api, "n5", says=replace(report(), gpus=()))
    add_node(api, "n6", says=report(gpu("GPU-d"), triton=TritonReport(False, "")))
    add_node(api, "n7")
    api.add(paths.PODS, pod("p1", mem="4Gi", on="n1", choice=CHOICE))
    api.add(paths.PODS, pod("lost", mem="1Gi", on="n4", choice="{"))
    return api


async def test_top_for_programs(machine: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    await call("top", "-o", "json")
    nodes = {one["name"]: one for one in json.loads(capsys.readouterr().out)["nodes"]}
    assert sorted(nodes) == ["n1", "n2", "n3", "n4", "n5", "n6"]
    troubles = {name: one["trouble"].partition(":")[0] for name, one in nodes.items()}
    assert troubles == {
        "n1": "",
        "n2": "StaleNodeFacts",
        "n3": "UnreadableNodeReport",
        "n4": "NoNodeReport",
        "n5": "",
        "n6": "TritonNotReady",
    }
    assert nodes["n3"]["trouble"] != "UnreadableNodeReport: "
    first, second = nodes["n1"]["gpus"]
    assert first == {
        "index": 0,
        "uuid": "GPU-a",
        "product": "T4",
        "totalBytes": 16 * GIB,
        "otherUseBytes": GIB,
        "headroomBytes": 2 * GIB,
        "reservedBytes": 6 * GIB,  # 5 of p1, and p2 is on one of them
        "freeBytes": 7 * GIB,
        "healthy": True,
        "reason": "",
    }
    assert (second["totalBytes"], second["freeBytes"], second["reason"]) == (None, None, "XID 79")
    assert nodes["n2"]["gpus"][0]["freeBytes"] is None  # figures of an agent that is silent
    assert nodes["n2"]["gpus"][0]["totalBytes"] == 16 * GIB
    assert nodes["n6"]["gpus"][0]["freeBytes"] == 16 * GIB
    one, other = nodes["n1"]["models"]
    assert one == {
        "pod": "team/p1",
        "modelId": "model-p1",
        "modelName": "model-p1",
        "gpu": "GPU-a",
        "otherGpus": ["GPU-b"],
        "requestedBytes": 4 * GIB,
        "measuredBytes": 5 * GIB,
        "state": "ready",
        "reason": "",
        "failure": None,
    }
    assert (other["pod"], other["state"], other["reason"]) == ("p2", "failed", "no memory")


async def test_top_for_people(machine: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    await call("top")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [
        "NODE",
        "GPU",
        "PRODUCT",
        "TOTAL",
        "OTHER",
        "USE",
        "HEADROOM",
        "RESERVED",
        "FREE",
        "STATE",
    ] in lines
    assert ["n1", "0", "T4", "16", "GiB", "1", "GiB", "2", "GiB", "6", "GiB", "7", "GiB", "ok"] in lines
    assert ["n1", "1", "T4", "?", "0", "B", "0", "B", "6", "GiB", "?", "XID", "79"] in lines
    assert ["n2", "0", "T4", "16", "GiB", "0", "B", "0", "B", "0", "B", "?", "StaleNodeFacts"] in lines
    assert ["n4", "-", "-", "-", "-", "-", "-", "-", "NoNodeReport"] in lines
    assert ["n5", "-", "-", "-", "-", "-", "-", "-", "NoGPU"] in lines
    assert ["MODEL", "POD", "NODE", "GPU", "REQUESTED", "MEASURED", "STATE"] in lines
    each = ["2", "x", "4", "GiB", "2", "x", "5", "GiB"]
    assert ["model-p1", "team/p1", "n1", "0,1", *each, "ready"] in lines
    assert ["-", "p2", "n1", "-", "1", "GiB", "?", "failed"] in lines


async def test_top_without_models_shows_no_table_of_them(
    api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report())
    await call("top")
    out = capsys.readouterr().out
    assert "FREE" in out
    assert "REQUESTED" not in out


@pytest.mark.parametrize("command", ["top", "why", "would-fit"])
async def test_an_api_server_that_refuses_is_named(command: str, api: Reader, tmp_path: Path) -> None:
    api.refused = {paths.NODES}
    api.objects[paths.pod("team", "p1")] = pod()
    argv = {"top": (), "why": ("p1", "-n", "team"), "would-fit": ("-f", _file(tmp_path, BARE))}[command]
    with pytest.raises(CannotStart, match=r"^API server http://api: 403 Forbidden"):
        await call(command, *argv)


# --- why


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
    assert said["message"].startswith("team/p1 asks for 3 GiB; 0/3 nodes: ")
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
    for status, told in (("True", ""), ("False", f"the binder's last word was: {' '.join(word.split())}")):
        one["status"]["conditions"] = [{"type": "PodScheduled", "status": status, "message": word}]
        said = await answer_of(api, one, capsys)
        assert said["fits"]
        assert said["remedy"] == told
    assert (
        said["message"] == "team/p1 asks for 3 GiB and fits on 1 of 2 nodes; the binder places it, if it runs"
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
async def test_what_is_no_name_is_not_asked_for(argv: tuple[str, ...], hint: str, api: Reader) -> None:
    with pytest.raises(ConfigError, match=hint):
        await call("why", *argv)
    assert api.asked == []
    with pytest.raises(Failed):
        await call("why", "a" * 253)


# --- would-fit

BARE = "spec: {containers: [{name: c, resources: {limits: {seldon.io/trtis-gpu-mem: 3Gi}}}]}"
FILES: dict[str, str] = {
    "a pod without a name": BARE,
    "a deployment": f"kind: Deployment\nspec: {{template: {{{BARE}}}}}",
    "between other documents": f"---\n---\nkind: Service\nspec: {{ports: []}}\n---\n{BARE}\n---\n- a list\n",
}
WRONG: dict[str, tuple[str, str]] = {
    "no YAML": ("{", "--filename: .*while parsing"),
    "no pod": ("kind: Service\nspec: {template: {spec: {containers: 1}}}", "0 pods or pod templates found"),
    "template without a spec": ("spec: {template: {metadata: {}}}", "0 pods or pod templates found"),
    "two pods": (f"{BARE}\n---\n{BARE}", "2 pods or pod templates found; write exactly one"),
    "unreadable request": (BARE.replace("3Gi", "1.5"), "the pod cannot be placed: container 'c'"),
}


def _file(folder: Path, text: str) -> str:
    path = folder / "pod.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("case", FILES)
async def test_a_file_that_would_fit(
    case: str, api: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report(), taints=[])
    await call("would-fit", "-f", _file(tmp_path, FILES[case]), "-o", "json")
    said = json.loads(capsys.readouterr().out)
    assert (
        said["message"] == "the pod asks for 3 GiB and fits on 1 of 1 nodes; the binder places it, if it runs"
    )
    assert said["fits"]
    assert "stage" not in said


async def test_a_pod_of_several_gpus_asks_for_its_total_and_for_a_share_of_it_on_each(
    api: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    """ecosystem A4: a pod that takes 40 GiB is said to take them."""
    add_node(api, "n1", says=report(*(gpu(f"GPU-{i}", index=i) for i in range(4))))
    said = await answer_of(api, pod(mem="40Gi", annotations={KEYS.gpu_count: "4"}), capsys)
    assert said["fits"]
    assert said["message"].startswith("team/p1 asks for 40 GiB (10 GiB on each of 4 GPUs) and fits on 1 of 1")
    said = await answer_of(api, pod(mem="68Gi", annotations={KEYS.gpu_count: "4"}), capsys)
    assert said["message"].startswith("team/p1 asks for 68 GiB (17 GiB on each of 4 GPUs); 0/1 nodes: ")
    asked = "no GPU is large enough: 17 GiB asked on each, 16 GiB on the largest when empty"
    assert said["remedy"] == asked


async def test_standard_input_and_the_exit_code_of_what_would_not_fit(
    api: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report(gpu(total=2 * GIB)))
    monkeypatch.setattr("sys.stdin", io.StringIO(BARE))
    with pytest.raises(SystemExit) as ended:
        await call("would-fit", "-f", "-")
    assert ended.value.code == 1
    assert "no GPU is large enough: 3 GiB asked, 2 GiB on the largest when empty" in capsys.readouterr().out


@pytest.mark.parametrize(("namespace", "fits"), [("team", True), ("elsewhere", False)])
@pytest.mark.parametrize("in_file", [True, False])
async def test_the_pod_s_namespace_is_the_file_s_or_the_option_s(
    namespace: str, fits: bool, in_file: bool, api: Reader, tmp_path: Path
) -> None:
    """Seen by whose company the pod finds."""
    add_node(api, "n1", says=report())
    friend = pod("friend", mem=None, on="n1")
    friend["metadata"]["labels"] = {"app": "x"}
    api.add(paths.PODS, friend)
    term = "{topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: x}}}"
    rule = f"affinity: {{podAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: [{term}]}}}}"
    text = BARE.replace("{containers", f"{{{rule}, containers")
    if in_file:
        text = f"metadata: {{namespace: {namespace}}}\n{text}"
    argv = ("-f", _file(tmp_path, text), "-n", "nobody" if in_file else namespace)
    if fits:
        await call("would-fit", *argv)
    else:
        with pytest.raises(SystemExit):
            await call("would-fit", *argv)


@pytest.mark.parametrize("case", WRONG)
async def test_a_file_that_cannot_be_used(case: str, api: Reader, tmp_path: Path) -> None:
    text, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        await call("would-fit", "-f", _file(tmp_path, text))
    with pytest.raises(ConfigError, match="No such file"):
        await call("would-fit", "-f", str(tmp_path / "none"))
