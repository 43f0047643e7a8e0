"""A node's report: what it says on the wire, what is rejected there, and what it leaves out to stay within its budget."""

import contextlib
import json
import random
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
from tests.fakes.values import replace

GIB = 1024**3
A, B, C = GpuUuid("GPU-a"), GpuUuid("GPU-b"), GpuUuid("GPU-c")
MODEL = ModelReport(
    pod_uid=PodUid("u1"),
    namespace="team",
    pod_name="p1",
    model_id=ModelId("id"),
    model_name=ModelName("net"),
    gpu=A,
    requested_bytes=5,
    measured_bytes=7,
    state=ModelState.FAILED,
    reason="too large",
)
T4 = GpuReport(
    uuid=A, index=0, product="T4", total_bytes=100, other_use_bytes=10, headroom_bytes=1, healthy=True
)
LOST = GpuReport(uuid=B, index=1, product="T4", headroom_bytes=2, healthy=False, reason="lost")
REPORT = NodeReport(
    server="triton",
    capabilities=("cuda",),
    triton=TritonReport(True, "2.51.0", ("onnxruntime", "python")),
    gpus=(T4, LOST),
    models=(MODEL,),
    generation=9,
    observed_at="2026-01-01T00:00:00Z",
)
GPUS = tuple(
    GpuReport(
        uuid=GpuUuid(f"GPU-{i:08d}-1111-2222-3333-444444444444"),
        index=i,
        product="NVIDIA H100",
        total_bytes=80 * GIB,
        other_use_bytes=0,
        headroom_bytes=GIB // 4,
        healthy=True,
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
# A text to the byte: other versions of Berth read it, and the binder compares it.
GOLDEN = (
    '{"v":1,"server":"triton","capabilities":["cuda"],'
    '"triton":{"ready":true,"version":"2.51.0","backends":["onnxruntime","python"]},'
    '"code":{"rule":"namespace","namespace":"team"},"gpus":['
    '{"uuid":"GPU-a","index":0,"product":"T4","totalBytes":100,"otherUseBytes":10,"headroomBytes":1,"healthy":true,'
    '"reason":""},'
    '{"uuid":"GPU-b","index":1,"product":"T4","totalBytes":null,"otherUseBytes":null,"headroomBytes":2,'
    '"healthy":false,"reason":"lost","broken":true}],"models":['
    '{"podUid":"u1","namespace":"team","podName":"p1","modelId":"id","modelName":"net","gpu":"GPU-a",'
    '"requestedBytes":5,"measuredBytes":7,"state":"failed","reason":"too large"},'
    '{"podUid":"u2","namespace":"team","podName":"p1","modelId":"id","modelName":"net","gpu":"GPU-a",'
    '"requestedBytes":5,"measuredBytes":7,"state":"failed","reason":"\\u00e9 \\ud83d\\ude00 \\ud83d \\"x\\"",'
    '"otherGpus":["GPU-b","GPU-c"],"failure":"capacity"},'
    '{"podUid":"u3","namespace":"team","podName":"p1","modelId":null,"modelName":null,"gpu":null,'
    '"requestedBytes":5,"measuredBytes":null,"state":"pending","reason":""}],'
    '"generation":9,"observedAt":"2026-01-01T00:00:00Z"}'
)


def test_a_report_is_written_and_read_to_the_byte() -> None:
    several = replace(
        MODEL,
        pod_uid=PodUid("u2"),
        other_gpus=(B, C),
        failure=Failure.CAPACITY,
        reason='\u00e9 \U0001f600 \ud83d "x"',
    )
    unknown = replace(
        MODEL,
        pod_uid=PodUid("u3"),
        gpu=None,
        model_id=None,
        model_name=None,
        measured_bytes=None,
        state=ModelState.PENDING,
        reason="",
    )
    written = replace(
        REPORT,
        code=CodeReport(CodeRule.NAMESPACE, "team"),
        gpus=(T4, replace(LOST, broken=True)),
        models=(MODEL, several, unknown),
    )
    assert written.encode() == GOLDEN
    assert NodeReport.decode(GOLDEN) == written


@pytest.mark.parametrize("rule", CodeRule)
@pytest.mark.parametrize("namespace", [None, "team-a"])
def test_the_rule_for_code_makes_the_round_trip(rule: CodeRule, namespace: str | None) -> None:
    written = replace(REPORT, code=CodeReport(rule, namespace))
    assert NodeReport.decode(written.encode()) == written


def test_the_gpus_of_a_model() -> None:
    assert MODEL.gpus == {A}
    assert replace(MODEL, other_gpus=(B,)).gpus == {A, B}
    assert replace(MODEL, gpu=None).gpus == frozenset()


def test_the_model_of_a_pod_is_found() -> None:
    other = replace(MODEL, pod_uid=PodUid("u2"))
    report = replace(REPORT, models=(MODEL, other))
    assert report.model_of(PodUid("u2")) == other
    assert report.model_of(PodUid("u3")) is None


def test_what_an_agent_leaves_out_is_unknown() -> None:
    data = json.loads(REPORT.encode())
    del data["code"]
    for key in ("product", "reason", "totalBytes", "otherUseBytes"):
        del data["gpus"][0][key]
    for key in ("namespace", "podName", "reason", "modelId", "modelName", "gpu", "measuredBytes"):
        del data["models"][0][key]
    del data["triton"]["version"]
    read = NodeReport.decode(json.dumps(data))
    assert read.code == CodeReport(CodeRule.ANY, None)
    assert read.triton.version == ""
    assert read.gpus[0] == GpuReport(uuid=A, index=0, headroom_bytes=1, healthy=True)
    assert read.models == (ModelReport(pod_uid=PodUid("u1"), requested_bytes=5, state=ModelState.FAILED),)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("v", 2, "node report has version 2; this Berth reads 1"),
        ("gpus", None, r"report.gpus: .*got `null`"),
        ("gpus.0", 7, r"report.gpus\[0\]: Expected `object`"),
        ("gpus.0.totalBytes", -1, r"gpus\[0\].totalBytes: Expected `int` >= 0"),
        ("gpus.0.totalBytes", 2**63, r"gpus\[0\].totalBytes: Expected `int` <= 9223372036854775807"),
        ("gpus.0.totalBytes", True, r"gpus\[0\].totalBytes: .*got `bool`"),
        ("gpus.0.totalBytes", "1", r"gpus\[0\].totalBytes: .*got `str`"),
        ("gpus.0.headroomBytes", None, r"gpus\[0\].headroomBytes: .*got `null`"),
        ("gpus.1.uuid", "GPU-a", "report.gpus names one GPU twice"),
        ("gpus.1.broken", "yes", r"gpus\[1\].broken: Expected `bool`"),
        ("code.rule", "some", r"report.code.rule: .*'some'"),
        ("code.namespace", 3, r"report.code.namespace: Expected `str"),
        ("code", "any", "report.code: Expected `object`"),
        ("code", {"namespace": "team"}, "report.code: .*missing required field `rule`"),
        ("triton", [], "report.triton: Expected `object`"),
        ("triton.backends", ["a", 1], r"report.triton.backends\[1\]: Expected `str`"),
        ("capabilities", [1], r"report.capabilities\[0\]: Expected `str`"),
        ("generation", -1, r"report.generation: Expected `int` >= 0"),
        ("models", {}, "report.models: Expected `array`"),
        ("models.0", "x", r"report.models\[0\]: Expected `object`"),
        ("models.0.state", "dancing", r"models\[0\].state: .*'dancing'"),
        ("models.0.state", "\ud800", r"models\[0\] is not Unicode: "),
        ("models.0.failure", "bad luck", r"models\[0\].failure: .*'bad luck'"),
        ("models.0.otherGpus", ["x", 1], r"models\[0\].otherGpus\[1\]: Expected `str`"),
        ("models.0.requestedBytes", True, r"models\[0\].requestedBytes: .*got `bool`"),
        ("models.0.requestedBytes", 1.5, r"models\[0\].requestedBytes: .*got `float`"),
        ("models.0.measuredBytes", -1, r"models\[0\].measuredBytes: Expected `int` >= 0"),
        ("models.0.podUid", None, r"models\[0\].podUid: .*got `null`"),
    ],
)
def test_an_unreadable_report_names_the_field(path: str, value: Any, message: str) -> None:
    data = json.loads(REPORT.encode())
    *way, last = path.split(".")
    target = data
    for part in way:
        target = target[int(part)] if part.isdigit() else target[part]
    target[int(last) if last.isdigit() else last] = value
    with pytest.raises(UnreadableReport, match=message):
        NodeReport.decode(json.dumps(data))


@pytest.mark.parametrize(
    "key", ["v", "server", "capabilities", "triton", "gpus", "models", "generation", "observedAt"]
)
def test_what_every_report_has(key: str) -> None:
    data = json.loads(REPORT.encode())
    del data[key]
    with pytest.raises(UnreadableReport, match=f"node report: .*`{key}`"):
        NodeReport.decode(json.dumps(data))


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "[" * 100_000, '{"v":1}', "x" * 300_000])
def test_a_text_that_is_no_report(text: str) -> None:
    with pytest.raises(UnreadableReport, match=r"^node report"):
        NodeReport.decode(text)


def test_random_damage_never_escapes_as_another_error() -> None:
    rng, text = random.Random(7), REPORT.encode()
    for _ in range(3000):
        at, length = rng.randrange(len(text)), rng.randrange(6)
        damaged = text[:at] + "".join(rng.choices('{}[]",:01nulltrue\x00', k=length)) + text[at + length :]
        with contextlib.suppress(UnreadableReport):
            NodeReport.decode(damaged)


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
        server="triton",
        capabilities=("python",),
        triton=TritonReport(True, "2.51.0", ("python",)),
        gpus=GPUS,
        models=models,
        generation=7,
        observed_at="2026-01-01T00:00:00Z",
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


def test_one_long_reason_is_reported_as_far_as_a_reason_goes() -> None:
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


def test_the_rule_for_code_a_broken_gpu_and_a_quarantine_are_reported_however_full_a_node_is() -> None:
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


def test_more_models_than_can_be_named_are_an_error_that_says_so() -> None:
    with pytest.raises(ReportTooLarge, match=r"2000 models is \d+ bytes over 65536"):
        report(*(model(i) for i in range(2000))).encode()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], ": Expected `array` of at least length 5, got 0"),
        (["u", [0], 1, 1, "ready", "capacity", 1], ": Expected `array` of at most length 6, got 7"),
        (["u", [8], 1, 1, "ready"], " is on GPU 8; the report has 8"),
        (["u", [-1], 1, 1, "ready"], " is on GPU -1"),
        (["u", [True], 1, 1, "ready"], r"\[1\]\[0\]: .*got `bool`"),
        (["u", [{}], 1, 1, "ready"], r"\[1\]\[0\]: .*got `object`"),
        (["u", [], 1, 1, "ready"], r"\[1\]: Expected `array` of length >= 1"),
        (["u", 0, 1, 1, "ready"], r"\[1\]: Expected `array`"),
        (["u", [0], -1, 1, "ready"], r"\[2\]: Expected `int` >= 0"),
        (["u", [0], 1, "1", "ready"], r"\[3\]: Expected `int"),
        (["u", [0], 1, 1, "dancing"], r"\[4\]: .*'dancing'"),
        ([1, [0], 1, 1, "ready"], r"\[0\]: Expected `str`"),
        (["u", [0, None], 1, 1, "ready"], " has null among its other GPUs"),
        (["u", [0], 1, 1, "failed", "bad luck"], r"\[5\]: .*'bad luck'"),
    ],
)
def test_a_brief_model_with_an_error_is_named(row: list[Any], message: str) -> None:
    data = json.loads(report().encode()) | {"models": [row]}
    with pytest.raises(UnreadableReport, match=r"^node report.models\[0\]" + message):
        NodeReport.decode(json.dumps(data))
