"""The node's report as its facts are now."""

from pathlib import Path

import pytest

from agent.gpu_facts import GpuFacts
from agent.gpus import GpuReading, GpusUnknown
from agent.node_report import NodeFacts, NodeReporting
from berth.contract.ids import GpuUuid
from berth.contract.report import CodeReport, CodeRule
from tests.fakes.agent_node import Node
from tests.fakes.objects import GIB

FACTS = NodeFacts(server_name="big", capabilities=("python",), backends=("python",), headroom_bytes=GIB)


class Port:
    instance_kind = "KIND_GPU"

    def __init__(self) -> None:
        self.readings = (GpuReading(GpuUuid("GPU-a"), 0, "T4", 16 * GIB, 3 * GIB, 0.0),)
        self.failure = ""

    async def read(self) -> tuple[GpuReading, ...]:
        if self.failure:
            raise GpusUnknown(self.failure)
        return self.readings


async def test_it_says_what_the_node_is_and_what_triton_holds(tmp_path: Path) -> None:
    node, port = Node(tmp_path), Port()
    gpus = GpuFacts(port, lambda: node.models.residency)
    view = NodeReporting(FACTS, node.slots, gpus, node.sync)
    await gpus.refresh()
    report = view.report()
    assert (report.server, report.capabilities, report.triton.backends) == ("big", ("python",), ("python",))
    assert (report.triton.ready, report.triton.version, report.models) == (False, "", ())
    assert report.code == CodeReport(CodeRule.NAMESPACE, None)
    (gpu,) = report.gpus
    assert (gpu.total_bytes, gpu.headroom_bytes, gpu.other_use_bytes) == (16 * GIB, GIB, 3 * GIB)
    for uid in ("p2", "p1"):
        await node.lifecycle.start_load(await node.stage(uid))
    await gpus.refresh()
    report = view.report()
    assert (report.triton.ready, report.triton.version) == (True, "2.51.0")
    assert [model.pod_uid for model in report.models] == ["p1", "p2"]
    assert report.code == CodeReport(CodeRule.NAMESPACE, "team")
    assert [gpu.other_use_bytes for gpu in report.gpus] == [0]


async def test_a_load_is_refused_by_unknown_gpus_and_a_report_lists_none(tmp_path: Path) -> None:
    node, port = Node(tmp_path), Port()
    gpus = GpuFacts(port, lambda: node.models.residency)
    view = NodeReporting(FACTS, node.slots, gpus, node.sync)
    port.failure = "no driver"
    await gpus.refresh()
    with pytest.raises(GpusUnknown, match="no driver"):
        view.gpu_reports()
    assert view.report().gpus == ()
    port.failure = ""
    await gpus.refresh()
    assert view.gpu_reports() == view.report().gpus != ()
