"""`berth top`: what it reads, and what it prints for people and for programs."""

import json
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.report import ModelState, TritonReport
from berth.kube import paths
from berth.kube.command import console
from binder.cli.top import ClusterView, GpuLine, ModelLine, NodeLines, table
from tests.fakes.commands import add_node, call, read_by_commands
from tests.fakes.objects import GIB, gpu, listed, pod, report
from tests.fakes.reader import Reader
from tests.fakes.values import replace

Json = dict[str, Any]
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Reader:
    return read_by_commands(monkeypatch)


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
    failures = {name: one["problem"].partition(":")[0] for name, one in nodes.items()}
    assert failures == {
        "n1": "",
        "n2": "StaleNodeFacts",
        "n3": "UnreadableNodeReport",
        "n4": "NoNodeReport",
        "n5": "",
        "n6": "TritonNotReady",
    }
    assert nodes["n3"]["problem"] != "UnreadableNodeReport: "
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


def test_into_a_pipe_nothing_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever counts nodes with grep has no terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name, product = "ip-10-0-129-201.eu-central-1.compute.internal", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    gpu = GpuLine(0, "GPU-a", product, 80 * GIB, 0, GIB, 0, None, False, "uncorrectable ECC error")
    view = ClusterView((NodeLines(name, "StaleNodeFacts", (gpu,), ()),))
    console().print(table(view))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert product in line
    assert line.rstrip().endswith("StaleNodeFacts")


def test_a_failed_model_says_what_that_means_for_other_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelLine("team/p1", "m", "m", "GPU-a", (), GIB, None, "failed", "died", "quarantined")
    gpu = GpuLine(0, "GPU-a", "T4", GIB, 0, 0, 0, GIB, False, "XID 79 (GPU has fallen off the bus)")
    view = ClusterView((NodeLines("n1", "", (gpu,), (model,)),))
    console().print(table(view))
    out = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in out if line.rstrip().endswith("failed (quarantined)")]
    assert [line for line in out if "XID 79 (GPU has fallen off the bus)" in line]
    assert '"failure": "quarantined"' in view.to_json()
