"""A node's report stays within its budget, whatever its models are called and whatever they say of
themselves, and never loses who holds how much of which GPU."""

import json
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.errors import ReportTooLarge, UnreadableReport
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.report import (
    BUDGET_BYTES,
    CodeReport,
    CodeRule,
    Failure,
    GpuReport,
    ModelReport,
    ModelState,
    NodeReport,
    TritonReport,
)

GIB = 1024**3
GPUS = tuple(
    GpuReport(
        GpuUuid(f"GPU-{i:08d}-1111-2222-3333-444444444444"), i, "NVIDIA H100", 80 * GIB, 0, GIB // 4, True
    )
    for i in range(8)
)
LONGEST_NAME = "n" * 253
REASONS = {
    "ASCII": "x" * 512,
    "emoji": "\U0001f600" * 512,
    "CJK": "\u4e2d" * 512,
    "quotes": '"\\' * 256,
    "control characters": "\x00\x1b" * 256,
    "half of a pair": "\ud83d" * 512,
}


def model(number: int, **changes: Any) -> ModelReport:
    made = ModelReport(
        pod_uid=PodUid(f"{number:08d}-aaaa-bbbb-cccc-dddddddddddd"),
        namespace="tenant-a",
        pod_name=f"model-{number}-6d4cf56db-abcde",
        model_id=ModelId(f"model-{number}"),
        model_name=ModelName(f"model-{number}"),
        gpu=GPUS[number % 8].uuid,
        requested_bytes=10 * GIB + number,
        measured_bytes=11 * GIB + number,
        state=ModelState.READY,
    )
    return replace(made, **changes)


def failed(number: int, reason: str) -> ModelReport:
    return model(
        number,
        state=ModelState.FAILED,
        reason=reason,
        failure=Failure.INVALID_MODEL,
        measured_bytes=None,
    )


def report(*models: ModelReport) -> NodeReport:
    return NodeReport(
        "triton",
        ("python",),
        TritonReport(True, "2.51.0", ("python",)),
        GPUS,
        models,
        7,
        "2026-01-01T00:00:00Z",
    )


def memory(of: NodeReport) -> list[Any]:
    """What the binder must know of every model."""
    return [
        (m.pod_uid, m.gpu, m.other_gpus, m.requested_bytes, m.measured_bytes, m.state, m.failure)
        for m in of.models
    ]


def sent(written: NodeReport) -> tuple[NodeReport, dict[str, Any]]:
    """What a reader makes of it, and its JSON; it is within the budget as the API server counts."""
    text = written.encode()
    assert len(text.encode()) <= BUDGET_BYTES
    read = NodeReport.decode(text)
    assert memory(read) == memory(written)
    assert replace(read, models=()) == replace(written, models=())
    return read, json.loads(text)


def test_what_fits_is_sent_whole() -> None:
    written = report(*(model(i) for i in range(100)), failed(100, "no such file"))
    read, data = sent(written)
    assert read == written
    assert "leftOut" not in data


@pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS.keys())
@pytest.mark.parametrize("count", [1, 41, 110, 315, 500])
def test_reasons_of_any_length_and_script(reason: str, count: int) -> None:
    read, _ = sent(report(*(failed(i, reason) for i in range(count))))
    for one in read.models:
        beginning, cut, _ = one.reason.partition("...")
        assert reason.startswith(beginning)
        assert cut or not beginning or beginning == reason


def test_one_long_reason_is_told_as_far_as_a_reason_goes() -> None:
    read, data = sent(report(failed(0, "because " + "\U0001f600" * 512)))
    assert read.models[0].reason.startswith("because \U0001f600")
    assert read.models[0].reason.endswith("...")
    assert len(json.dumps(data["models"][0]["reason"])) - 2 <= 512


def test_forty_one_failing_models_keep_their_names_and_the_beginning_of_their_reasons() -> None:
    read, _ = sent(report(*(failed(i, REASONS["emoji"]) for i in range(41))))
    assert all(m.model_name and len(m.reason) > 30 for m in read.models)


def test_reasons_go_before_names_and_the_report_says_so() -> None:
    read, data = sent(report(*(failed(i, "x" * 512) for i in range(140))))
    assert all(m.model_name and m.reason == "x" * 125 + "..." for m in read.models)
    assert data["leftOut"] == ["reasons beyond 128 bytes"]


def test_five_hundred_models_and_names_of_those_that_do_not_serve() -> None:
    read, data = sent(report(*(model(i) for i in range(450)), *(failed(i, "bad") for i in range(450, 500))))
    brief = [m for m in read.models if m.model_name is None]
    assert all(m.model_name and m.reason == "bad" for m in read.models if m.state is ModelState.FAILED)
    assert data["leftOut"][-1] == f"names and reasons of {len(brief)} models"
    assert sum(isinstance(one, list) for one in data["models"]) == len(brief) < 450


def test_the_longest_names_on_a_full_node() -> None:
    def named(number: int) -> ModelReport:
        return model(
            number,
            namespace="s" * 63,
            pod_name=LONGEST_NAME,
            model_id=ModelId(LONGEST_NAME),
            model_name=ModelName("m" * 128),
        )

    sent(report(*(named(i) for i in range(110))))


def test_models_on_several_gpus_on_none_and_on_one_that_is_gone() -> None:
    gone = GpuUuid("GPU-gone")
    kinds = (
        {"other_gpus": (GPUS[5].uuid, gone)},
        {"gpu": None, "requested_bytes": 0, "measured_bytes": None},
        {"gpu": gone},
        {"gpu": None, "other_gpus": (GPUS[1].uuid,)},
        {"measured_bytes": 0},
    )
    sent(report(*(model(i, **kinds[i % len(kinds)]) for i in range(500))))


def test_the_rule_for_code_a_broken_gpu_and_a_quarantine_are_told_however_full_a_node_is() -> None:
    """What keeps tenants apart, and what no other node is to be tried for, is never left out."""
    code = CodeReport(CodeRule.NAMESPACE, "n" * 63)
    broken = replace(GPUS[0], healthy=False, broken=True, reason="XID 79 " + "x" * 600)
    bad = model(500, state=ModelState.FAILED, failure=Failure.QUARANTINED, reason="took Triton down " * 40)
    full = report(*(failed(i, "x" * 512) for i in range(480)), bad)
    text = replace(full, code=code, gpus=(broken, *GPUS[1:])).encode()
    assert len(text) <= BUDGET_BYTES
    read = NodeReport.decode(text)
    assert read.code == code
    assert [one.broken for one in read.gpus] == [True, *[False] * 7]
    assert read.models[-1].failure is Failure.QUARANTINED
    assert any(isinstance(one, list) for one in json.loads(text)["models"])


def test_a_quarantine_in_a_brief_row_is_one_still() -> None:
    bad = model(1, state=ModelState.FAILED, failure=Failure.QUARANTINED, reason="")
    row = bad.in_brief([gpu.uuid for gpu in GPUS])
    assert row[-2:] == ["failed", "quarantined"]
    again = ModelReport.from_brief(row, [gpu.uuid for gpu in GPUS], path="models[0]")
    assert (again.state, again.failure) == (ModelState.FAILED, Failure.QUARANTINED)


def test_more_models_than_can_be_named_are_an_error_that_says_so() -> None:
    with pytest.raises(ReportTooLarge, match=r"2000 models is \d+ bytes over 65536"):
        report(*(model(i) for i in range(2000))).encode()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "has 0 entries; podUid, gpus"),
        (["u", [0], 1, 1, "ready", "capacity", 1], "has 7 entries"),
        (["u", [8], 1, 1, "ready"], "is on GPU 8; the report has 8"),
        (["u", [-1], 1, 1, "ready"], "is on GPU -1"),
        (["u", [True], 1, 1, "ready"], "is on GPU True"),
        (["u", [{}], 1, 1, "ready"], "is on GPU {}"),
        (["u", [], 1, 1, "ready"], "for its GPUs; a list is expected"),
        (["u", 0, 1, 1, "ready"], "for its GPUs; a list is expected"),
        (["u", [0], -1, 1, "ready"], "requestedBytes is -1"),
        (["u", [0], 1, "1", "ready"], "measuredBytes is '1'"),
        (["u", [0], 1, 1, "dancing"], "state is 'dancing'"),
        ([1, [0], 1, 1, "ready"], "podUid is 1"),
        (["u", [0, None], 1, 1, "ready"], "something other than strings"),
        (["u", [0], 1, 1, "failed", "bad luck"], "failure is 'bad luck'"),
    ],
)
def test_a_brief_model_with_an_error_is_named(row: list[Any], message: str) -> None:
    data = json.loads(report().encode()) | {"models": [row]}
    with pytest.raises(UnreadableReport, match=r"node report.models\[0\].*" + message.replace("{}", r"\{\}")):
        NodeReport.decode(json.dumps(data))
