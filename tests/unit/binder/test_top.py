"""What `berth top` prints."""

import pytest

from berth.kube.command import console
from binder.cli.top import ClusterView, GpuLine, ModelLine, NodeLines, table
from tests.fakes.objects import GIB


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
