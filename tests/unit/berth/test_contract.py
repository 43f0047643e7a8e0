import contextlib
import dataclasses
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint, UnixSocket, parse_address
from berth.contract.errors import InvalidPod, InvalidValue, UnreadableReport
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid, parse_model_name
from berth.contract.keys import Keys
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.pod import effective_request, is_model_pod, parse_model_pod
from berth.contract.report import (
    CodeReport,
    CodeRule,
    GpuReport,
    ModelReport,
    ModelState,
    NodeReport,
    TritonReport,
)

KEYS = Keys()
GIB = 1024**3
GPU = GpuReport(GpuUuid("GPU-a"), 0, "A100", 40 * GIB, 2 * GIB, GIB, True)
REPORT = NodeReport(
    server="triton",
    capabilities=("cuda", "python"),
    triton=TritonReport(True, "2.51.0", ("python",)),
    gpus=(GPU, GpuReport(GpuUuid("GPU-b"), 1, "A100", None, None, GIB, False, "GPU is lost")),
    models=(
        ModelReport(
            PodUid("u1"), "team", "p1", ModelId("m"), ModelName("m"), GPU.uuid, GIB, None, ModelState.LOADING
        ),
    ),
    generation=3,
    observed_at="2026-01-01T00:00:00Z",
)


@pytest.mark.parametrize("name", ["resnet", "a", "A.b_c-1", "0", "x" * 128])
def test_model_names_that_are_fine(name: str) -> None:
    assert parse_model_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        ".",
        "a/b",
        "../a",
        "a..b",
        "a\n",
        "a\x00",
        "\x1b[31m",
        "é",
        "-a",
        "_a",
        ".a",
        "a b",
        "x" * 300,
        "stats",
        "a%2fb",
        "a\\b",
    ],
)
def test_model_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue):
        parse_model_name(name)


def test_the_default_keys_are_those_of_the_proof_of_concept() -> None:
    assert KEYS.gpu_mem == "seldon.io/trtis-gpu-mem"
    assert KEYS.model_id == "seldon.io/trtis-model-id"
    assert KEYS.node_total == "seldon.io/trtis-gpu-mem-total"


@pytest.mark.parametrize("prefix", ["", "seldon", "Seldon.io/x", "/x", "a/b/c", "a b/", "x" * 300 + "/"])
def test_a_prefix_that_no_key_may_have(prefix: str) -> None:
    with pytest.raises(InvalidValue, match="not a key prefix"):
        Keys(prefix)


def test_report_round_trip() -> None:
    assert NodeReport.decode(REPORT.encode()) == REPORT


@pytest.mark.parametrize("rule", CodeRule)
@pytest.mark.parametrize("namespace", [None, "team-a"])
def test_the_rule_for_code_makes_the_round_trip(rule: CodeRule, namespace: str | None) -> None:
    told = replace(REPORT, code=CodeReport(rule, namespace))
    assert json.loads(told.encode())["code"] == {"rule": rule.value, "namespace": namespace}
    assert NodeReport.decode(told.encode()) == told


def test_a_report_of_an_agent_that_knows_no_rule_for_code_holds_to_none() -> None:
    data = json.loads(REPORT.encode())
    del data["code"]
    assert NodeReport.decode(json.dumps(data)).code == CodeReport(CodeRule.ANY, None)


def test_a_gpu_that_is_broken_says_so_and_no_other_does() -> None:
    told = replace(REPORT, gpus=(GPU, replace(REPORT.gpus[1], broken=True)))
    assert [one.get("broken") for one in json.loads(told.encode())["gpus"]] == [None, True]
    assert NodeReport.decode(told.encode()) == told


def _mutated(path: str, value: Any) -> str:
    data = json.loads(REPORT.encode())
    target, *rest = data, *path.split(".")
    for part in rest[:-1]:
        target = target[int(part)] if part.isdigit() else target[part]
    target[rest[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("v", 2, "version 2"),
        ("gpus", None, r"node report.gpus is None"),
        ("gpus.0.totalBytes", -1, r"gpus\[0\].totalBytes is -1"),
        ("gpus.0.totalBytes", True, r"gpus\[0\].totalBytes is True"),
        ("gpus.0.totalBytes", "1", r"gpus\[0\].totalBytes is '1'"),
        ("gpus.0.headroomBytes", None, r"gpus\[0\].headroomBytes is None"),
        ("gpus.1.uuid", "GPU-a", "names one GPU twice"),
        ("gpus.1.broken", "yes", r"gpus\[1\].broken is 'yes'"),
        ("code.rule", "some", r"code.rule is 'some'"),
        ("code.namespace", 3, r"code.namespace is 3"),
        ("code", "any", "node report.code is not a JSON object"),
        ("models.0.state", "dancing", r"models\[0\].state is 'dancing'"),
        ("triton", [], "node report.triton is not a JSON object"),
        ("capabilities", [1], "capabilities holds something other than strings"),
    ],
)
def test_an_unreadable_report_names_the_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(UnreadableReport, match=message):
        NodeReport.decode(_mutated(path, value))


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "[" * 100_000, '{"v":1}', "x" * 300_000])
def test_a_report_that_is_none(text: str) -> None:
    with pytest.raises(UnreadableReport):
        NodeReport.decode(text)


def test_random_damage_never_escapes_as_another_error() -> None:
    rng, text = random.Random(7), REPORT.encode()
    for _ in range(3000):
        at, length = rng.randrange(len(text)), rng.randrange(6)
        damaged = text[:at] + "".join(rng.choices('{}[]",:01nulltrue\x00', k=length)) + text[at + length :]
        with contextlib.suppress(UnreadableReport):
            NodeReport.decode(damaged)


def test_free_memory_counts_the_larger_of_requested_and_measured() -> None:
    held = reserved_bytes(10 * GIB) + reserved_bytes(5 * GIB, 4 * GIB) + reserved_bytes(1 * GIB, 3 * GIB)
    assert free_bytes(GPU, held) == (40 - 1 - 2 - 10 - 5 - 3) * GIB


def test_free_memory_is_negative_when_over_and_unknown_when_not_known() -> None:
    assert free_bytes(GPU, 40 * GIB) == -3 * GIB
    for unknown in ({"total_bytes": None}, {"other_use_bytes": None}, {"healthy": False}):
        assert free_bytes(dataclasses.replace(GPU, **unknown), 0) is None  # type: ignore[arg-type]


def test_gpu_choice_round_trip_and_errors() -> None:
    choice = GpuChoice(GpuUuid("GPU-a"), 1, 5)
    assert GpuChoice.decode(choice.encode()) == choice
    assert json.loads(choice.encode()) == {"v": 1, "uuid": "GPU-a", "index": 1, "bytes": 5}
    for text in (
        "",
        "{}",
        '{"v":2,"uuid":"a","index":0,"bytes":1}',
        '{"v":1,"uuid":"a","index":0,"bytes":-1}',
    ):
        with pytest.raises(InvalidValue):
            GpuChoice.decode(text)


def _pod(
    annotations: dict[str, str] | None = None, limits: tuple[str, ...] = ("400Mi",), **spec: Any
) -> dict[str, Any]:
    containers = [{"name": f"c{i}", "resources": {"limits": {KEYS.gpu_mem: q}}} for i, q in enumerate(limits)]
    return {
        "metadata": {"namespace": "team", "name": "p", "uid": "u", "annotations": annotations or {}},
        "spec": {"containers": containers, **spec},
        "status": {"phase": "Pending"},
    }


def _init(quantity: str, **more: Any) -> dict[str, Any]:
    return {"name": "init", "resources": {"limits": {KEYS.gpu_mem: quantity}}, **more}


@pytest.mark.parametrize(
    ("limits", "inits", "expected"),
    [
        (("1", "2"), [], 3),
        (("1", "2"), [_init("9")], 9),
        (("5", "5"), [_init("9"), _init("3")], 10),
        (("5",), [_init("2", restartPolicy="Always")], 7),
        (("1",), [_init("2", restartPolicy="Always"), _init("9")], 11),
        (("1",), [_init("9"), _init("2", restartPolicy="Always")], 9),
    ],
)
def test_request_at_the_pods_peak(limits: tuple[str, ...], inits: list[Any], expected: int) -> None:
    assert effective_request(_pod(limits=limits, initContainers=inits), KEYS.gpu_mem) == expected


def test_requests_count_where_there_is_no_limit() -> None:
    pod = _pod(limits=())
    pod["spec"]["containers"] = [{"name": "c", "resources": {"requests": {KEYS.gpu_mem: "7"}}}]
    assert effective_request(pod, KEYS.gpu_mem) == 7
    assert is_model_pod(pod, KEYS)
    assert not is_model_pod(_pod(limits=()), KEYS)
    assert is_model_pod(_pod({KEYS.gpu: "{}"}, limits=()), KEYS)


def test_a_pod_of_the_proof_of_concept() -> None:
    parsed = parse_model_pod(_pod({KEYS.model_id: "resnet"}, limits=("11Gi",)), KEYS)
    assert (parsed.model_id, parsed.model_name, parsed.request_bytes) == ("resnet", "resnet", 11 * GIB)
    assert parsed.gpu is None
    assert str(parsed.ref) == "team/p"


def test_a_requirement_may_say_onnx_for_onnxruntime() -> None:
    """ecosystem: other systems call the backend so; a pod that says both says one thing."""
    pod = _pod({KEYS.requirements: "onnx, gpu-fast,onnxruntime"}, limits=("11Gi",))
    assert parse_model_pod(pod, KEYS).requirements == ("gpu-fast", "onnxruntime")


def test_an_anonymous_pod_has_no_name() -> None:
    assert parse_model_pod(_pod(), KEYS).model_name is None


def test_the_name_may_differ_from_the_id() -> None:
    pod = parse_model_pod(_pod({KEYS.model_id: "team/resnet v2", KEYS.model_name: "resnet"}), KEYS)
    assert (pod.model_id, pod.model_name) == ("team/resnet v2", "resnet")


@pytest.mark.parametrize(
    ("annotations", "limits", "message"),
    [
        ({KEYS.model_id: "a/b"}, ("1",), "annotation seldon.io/trtis-model-id: model name"),
        ({KEYS.model_name: ".."}, ("1",), "annotation seldon.io/trtis-model-name"),
        ({KEYS.model_id: "a\x07"}, ("1",), "must be printable"),
        ({KEYS.requirements: "a,,b"}, ("1",), "write a comma list"),
        ({KEYS.gpu: "{"}, ("1",), "annotation seldon.io/trtis-gpu: GPU choice is not JSON"),
        ({}, ("1.5",), "container 'c0': seldon.io/trtis-gpu-mem: '1.5' is not a whole number"),
        ({}, ("lots",), "is not a quantity"),
    ],
)
def test_a_wrong_pod_says_what_and_where(
    annotations: dict[str, str], limits: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidPod, match=message):
        parse_model_pod(_pod(annotations, limits), KEYS)


def test_an_address_is_a_port_or_a_socket() -> None:
    for text, meant in (
        ("127.0.0.1:80", Endpoint("127.0.0.1", 80)),
        ("unix:/run/t.sock:8001", UnixSocket("/run/t.sock:8001")),
        ("unix:8001", Endpoint("unix", 8001)),
        ("[::1]:80", Endpoint("::1", 80)),
    ):
        assert parse_address(text) == meant
        assert str(meant) == text


@pytest.mark.parametrize(
    "text", ["unix:", "unix:run/t", "unix:/run/", "unix:/" + "x" * 107, "/run/t", "unix:/a\0b"]
)
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_address(text)
