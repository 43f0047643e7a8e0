"""What stands in annotations and environment variables, character by character, and what is refused there."""

import json
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidPod, InvalidValue, UnreadableReport
from berth.contract.fields import TEXT_LIMIT, Fields
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import MODEL_NAME_LIMIT, GpuUuid, ModelId, ModelName, PodUid, parse_model_name
from berth.contract.keys import AGENT_AUDIENCE, SCHEDULER_NAME, Keys, agent_lease_name
from berth.contract.pod import (
    MOST_GPUS,
    effective_request,
    has_ended,
    is_deleting,
    is_model_pod,
    node_of,
    parse_model_pod,
    pod_ref,
)
from berth.contract.quantity import ceil_units, format_bytes, parse_bytes, parse_quantity
from berth.contract.report import Failure, GpuReport, ModelReport, ModelState, NodeReport, TritonReport

KEYS = Keys()
A, B, C = GpuUuid("GPU-a"), GpuUuid("GPU-b"), GpuUuid("GPU-c")
MODEL = ModelReport(
    PodUid("u1"), "team", "p1", ModelId("id"), ModelName("net"), A, 5, 7, ModelState.FAILED, "too large"
)
REPORT = NodeReport(
    server="triton",
    capabilities=("cuda",),
    triton=TritonReport(True, "2.51.0", ("onnxruntime", "python")),
    gpus=(GpuReport(A, 0, "T4", 100, 10, 1, True), GpuReport(B, 1, "T4", None, None, 2, False, "lost")),
    models=(MODEL,),
    generation=9,
    observed_at="2026-01-01T00:00:00Z",
)


def told(*models: ModelReport) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(replace(REPORT, models=models).encode())["models"]
    return told


def test_a_report_as_other_versions_read_it() -> None:
    said = json.loads(REPORT.encode())
    assert (said["v"], said["server"], said["capabilities"]) == (1, "triton", ["cuda"])
    assert said["triton"] == {"ready": True, "version": "2.51.0", "backends": ["onnxruntime", "python"]}
    assert said["gpus"][1] == {
        "uuid": "GPU-b",
        "index": 1,
        "product": "T4",
        "totalBytes": None,
        "otherUseBytes": None,
        "headroomBytes": 2,
        "healthy": False,
        "reason": "lost",
    }
    assert said["models"] == [
        {
            "podUid": "u1",
            "namespace": "team",
            "podName": "p1",
            "modelId": "id",
            "modelName": "net",
            "gpu": "GPU-a",
            "requestedBytes": 5,
            "measuredBytes": 7,
            "state": "failed",
            "reason": "too large",
        }
    ]
    assert (said["generation"], said["observedAt"]) == (9, "2026-01-01T00:00:00Z")


def test_what_only_some_models_have_is_told_of_those_only() -> None:
    several = replace(MODEL, other_gpus=(B, C), failure=Failure.CAPACITY)
    plain, more = told(MODEL, several)
    assert not {"otherGpus", "failure"} & plain.keys()
    assert (more["otherGpus"], more["failure"]) == (["GPU-b", "GPU-c"], "capacity")
    report = replace(REPORT, models=(MODEL, replace(several, pod_uid=PodUid("u2"))))
    assert NodeReport.decode(report.encode()) == report


def test_a_model_that_nobody_knows_the_place_of_is_on_no_gpu() -> None:
    assert MODEL.gpus == {A}
    assert replace(MODEL, other_gpus=(B,)).gpus == {A, B}
    unknown = replace(MODEL, gpu=None, model_id=None, model_name=None, measured_bytes=None)
    assert unknown.gpus == frozenset()
    assert NodeReport.decode(replace(REPORT, models=(unknown,)).encode()).models == (unknown,)


def test_the_model_of_a_pod_is_found() -> None:
    other = replace(MODEL, pod_uid=PodUid("u2"))
    report = replace(REPORT, models=(MODEL, other))
    assert report.model_of(PodUid("u2")) == other
    assert report.model_of(PodUid("u3")) is None


def test_what_older_agents_left_out_is_taken_as_not_said() -> None:
    said = json.loads(REPORT.encode())
    for key in ("product", "reason"):
        del said["gpus"][0][key]
    for key in ("namespace", "podName", "reason", "modelId", "modelName", "gpu", "measuredBytes"):
        del said["models"][0][key]
    del said["triton"]["version"]
    report = NodeReport.decode(json.dumps(said))
    assert (report.gpus[0].product, report.gpus[0].reason, report.triton.version) == ("", "", "")
    assert report.models == (
        replace(
            MODEL,
            namespace="",
            pod_name="",
            reason="",
            model_id=None,
            model_name=None,
            gpu=None,
            measured_bytes=None,
        ),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"failure": "bad luck"}, r"models\[0\].failure is 'bad luck'"),
        ({"otherGpus": ["x", 1]}, r"models\[0\].otherGpus holds something other than strings"),
        ({"requestedBytes": True}, r"models\[0\].requestedBytes is True"),
        ({"requestedBytes": 1.5}, r"models\[0\].requestedBytes is 1.5"),
        ({"measuredBytes": -1}, r"models\[0\].measuredBytes is -1"),
        ({"podUid": None}, r"models\[0\].podUid is None; a string is expected"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(change: dict[str, Any], message: str) -> None:
    said = json.loads(REPORT.encode())
    said["models"][0].update(change)
    with pytest.raises(UnreadableReport, match=f"node report.{message}"):
        NodeReport.decode(json.dumps(said))


def test_a_text_is_read_up_to_its_limit() -> None:
    text = '{"a":1}'
    assert Fields.parse(text, what="it", limit=len(text)).integer("a") == 1
    with pytest.raises(InvalidValue, match="it has 7 characters; at most 6 are read"):
        Fields.parse(text, what="it", limit=len(text) - 1)
    assert 64 * 1024 <= TEXT_LIMIT <= 256 * 1024  # all annotations of an object together have no more
    assert Fields.of({"a": 0, "b": None}, path="x").integer("a") == 0
    assert Fields.of({"b": None}, path="x").optional_strings("b") == ()


def test_a_choice_of_several_gpus() -> None:
    choice = GpuChoice(A, 0, 5, (GpuRef(B, 1), GpuRef(C, 3)))
    assert choice.encode() == (
        '{"v":1,"uuid":"GPU-a","index":0,"bytes":5,"others":[{"uuid":"GPU-b","index":1},{"uuid":"GPU-c","index":3}]}'
    )
    assert GpuChoice.decode(choice.encode()) == choice
    assert choice.gpus == (GpuRef(A, 0), GpuRef(B, 1), GpuRef(C, 3))
    assert choice.uuids == (A, B, C)
    assert GpuChoice(A, 0, 5).uuids == (A,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "GPU choice has version 2; this Berth reads 1"),
        ({"bytes": -1}, "GPU choice.bytes is -1"),
        ({"index": None}, "GPU choice.index is None"),
        ({"uuid": 7}, "GPU choice.uuid is 7"),
        ({"others": [{"uuid": "GPU-a", "index": 1}]}, "GPU choice names one GPU twice"),
        ({"others": [{"uuid": "GPU-b"}]}, r"GPU choice.others\[0\].index is None"),
        ({"others": None}, "GPU choice.others is None"),
    ],
)
def test_a_choice_that_cannot_be_read_says_what(change: dict[str, Any], message: str) -> None:
    said = {"v": 1, "uuid": "GPU-a", "index": 0, "bytes": 5, **change}
    with pytest.raises(InvalidValue, match=message):
        GpuChoice.decode(json.dumps(said))


def test_every_key_begins_with_the_prefix() -> None:
    names = {
        "gpu_mem": "gpu-mem",
        "model_id": "model-id",
        "model_name": "model-name",
        "requirements": "requirements",
        "server": "server",
        "gpu_count": "gpu-count",
        "gpu_product": "gpu-product",
        "gpu": "gpu",
        "loaded_condition": "model-loaded",
        "node_total": "gpu-mem-total",
        "node_used": "gpu-mem-used",
        "node_util": "gpu-util",
        "report": "report",
    }
    for prefix in ("seldon.io/trtis-", "example.org/"):
        assert {name: getattr(Keys(prefix), name) for name in names} == {
            name: prefix + end for name, end in names.items()
        }
    assert Keys().prefix == "seldon.io/trtis-"
    # Users write these in manifests, and the API server in tokens.
    assert (SCHEDULER_NAME, AGENT_AUDIENCE) == ("trtis-scheduler", "berth-agent")
    assert agent_lease_name("node-1") == "berth-agent-node-1"


def test_a_name_may_be_as_long_as_a_directory_and_a_url_take() -> None:
    assert parse_model_name("x" * MODEL_NAME_LIMIT) == "x" * MODEL_NAME_LIMIT
    assert 63 <= MODEL_NAME_LIMIT <= 253
    with pytest.raises(InvalidValue, match=f"has {MODEL_NAME_LIMIT + 1} characters; at most"):
        parse_model_name("x" * (MODEL_NAME_LIMIT + 1))


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "is empty"), ("a..b", "must not contain '..'"), ("stats", "is reserved"), ("a/b", "may hold only")],
)
def test_a_name_that_is_refused_says_why(name: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=f"^model name.* {message}"):
        parse_model_name(name)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("h:0", Endpoint("h", 0)),
        ("127.0.0.1:65535", Endpoint("127.0.0.1", 65535)),
        ("[::1]:80", Endpoint("::1", 80)),
        ("[h]:1", Endpoint("h", 1)),
    ],
)
def test_addresses(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["h", "h:", ":80", "::1:80", "[::1:80", "::1]:80", "h:65536", "h:²", "h:+1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidValue, match="is not HOST:PORT"):
        Endpoint.parse(text)


def pod(annotations: dict[str, str] | None = None, **of_pod: Any) -> dict[str, Any]:
    container = {"name": "c", "resources": {"limits": {KEYS.gpu_mem: "400Mi"}}}
    meta = {"namespace": "team", "name": "p", "uid": "u", "annotations": annotations}
    return {"metadata": meta, "spec": {"containers": [container]}, **of_pod}


def test_what_a_pod_may_ask_for() -> None:
    asked = parse_model_pod(
        pod(
            {
                KEYS.model_id: " resnet ",
                KEYS.requirements: "python, cuda,python",
                KEYS.server: "blue",
                KEYS.gpu: GpuChoice(A, 1, 5).encode(),
                KEYS.gpu_count: "2",
                KEYS.gpu_product: "T4,A10",
            }
        ),
        KEYS,
    )
    assert (asked.model_id, asked.model_name, asked.declared_name) == ("resnet", "resnet", None)
    assert (asked.requirements, asked.server) == (("cuda", "python"), "blue")
    assert asked.gpu == GpuChoice(A, 1, 5)
    assert (asked.gpu_count, asked.gpu_products) == (2, ("A10", "T4"))
    assert (asked.node, asked.deleting, asked.ended) == (None, False, False)


def test_what_a_pod_does_not_say() -> None:
    asked = parse_model_pod(pod(None), KEYS)
    assert (asked.model_id, asked.requirements, asked.server) == (None, (), None)
    assert (asked.gpu, asked.gpu_count, asked.gpu_products) == (None, 1, ())
    assert parse_model_pod(pod({KEYS.model_id: " ", KEYS.server: ""}), KEYS).model_id is None


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("64", 64)])
def test_how_many_gpus(text: str, count: int) -> None:
    assert parse_model_pod(pod({KEYS.gpu_count: text}), KEYS).gpu_count == count
    assert 16 <= MOST_GPUS <= 64


@pytest.mark.parametrize("text", ["0", "65", "-1", "two", "1.5", "²", "٣", "+1"])
def test_how_many_gpus_no_node_has(text: str) -> None:
    with pytest.raises(InvalidPod, match=r"gpu-count is .*; write a number from 1 to 64"):
        parse_model_pod(pod({KEYS.gpu_count: text}), KEYS)


def on_gpus(total: str, count: str, choice: GpuChoice | None = None) -> dict[str, Any]:
    asking = pod({KEYS.gpu_count: count} | ({} if choice is None else {KEYS.gpu: choice.encode()}))
    asking["spec"]["containers"][0]["resources"]["limits"][KEYS.gpu_mem] = total
    return asking


@pytest.mark.parametrize(
    ("total", "count", "each"),
    [
        ("40Gi", "1", 40 * 1024**3),
        ("40Gi", "4", 10 * 1024**3),
        ("6", "3", 2),
        ("0", "3", 0),
        ("1e40", "3", 2**62 // 3),  # more than any machine has: no amount is the next right one
    ],
)
def test_the_limit_is_the_pods_total(total: str, count: str, each: int) -> None:
    """ecosystem A4: with `gpu-count: N` each of N GPUs carries total ÷ N, so a quota counts what is taken."""
    assert parse_model_pod(on_gpus(total, count), KEYS).request_bytes == each


@pytest.mark.parametrize(
    ("total", "count", "right"),
    [
        ("10Gi", "3", "10737418242, or 10242Mi"),
        ("1", "64", "64"),
        ("7", "2", "8"),
        ("1025Mi", "2", None),
        ("1048577", "2", "1048578"),
    ],
)
def test_a_total_that_its_gpus_cannot_share(total: str, count: str, right: str | None) -> None:
    """ecosystem A4: refused, with the next right value."""
    asking = on_gpus(total, count)
    if right is None:  # an odd number of MiB is an even number of bytes
        assert parse_model_pod(asking, KEYS).request_bytes == 1025 * 1024**2 // 2
        return
    with pytest.raises(InvalidPod) as refused:
        parse_model_pod(asking, KEYS)
    assert str(refused.value) == (
        f"limit {KEYS.gpu_mem} is the pod's total, {parse_bytes(total)} bytes, which is no whole number of "
        f"bytes for each of {count} GPUs (annotation {KEYS.gpu_count}); the next that is: {right}"
    )
    next_right = on_gpus(right.split(",")[0], count)
    assert parse_model_pod(next_right, KEYS).request_bytes * int(count) == int(right.split(",")[0])


def test_a_placed_pod_has_its_total_on_the_gpus_that_it_was_given() -> None:
    """ecosystem A4: a count that its owner changes afterwards takes nothing off a GPU."""
    given = GpuChoice(A, 0, 20, (GpuRef(B, 1),))
    for count in ("1", "2", "64"):
        assert parse_model_pod(on_gpus("40", count, given), KEYS).request_bytes == 20


def test_an_annotation_is_as_long_as_a_name_may_be() -> None:
    longest = "x" * 253
    assert parse_model_pod(pod({KEYS.server: longest}), KEYS).server == longest
    with pytest.raises(InvalidPod, match=f"annotation {KEYS.server} must be printable and at most 253"):
        parse_model_pod(pod({KEYS.server: longest + "x"}), KEYS)
    with pytest.raises(InvalidPod, match="must be printable"):
        parse_model_pod(pod({KEYS.requirements: "a\x00b"}), KEYS)


def test_where_a_pod_stands_in_its_life() -> None:
    assert node_of(pod()) is None
    assert node_of(pod(spec={"nodeName": "n1"})) == "n1"
    assert node_of(pod(spec={"nodeName": ""})) is None
    phases = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
    assert [has_ended(pod(status={"phase": phase})) for phase in phases] == [False, False, True, True, False]
    assert not has_ended(pod())
    assert not is_deleting(pod())
    dying = pod()
    dying["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert is_deleting(dying)
    bound = parse_model_pod({**dying, "status": {"phase": "Failed"}}, KEYS)
    assert (bound.deleting, bound.ended) == (True, True)
    assert pod_ref({"metadata": {"name": "p"}}).uid == ""


@pytest.mark.parametrize(
    ("resources", "amount"),
    [
        ({"limits": {KEYS.gpu_mem: "2"}, "requests": {KEYS.gpu_mem: "1"}}, 2),
        ({"limits": {"cpu": "1"}, "requests": {KEYS.gpu_mem: "1"}}, 1),
        ({"limits": None, "requests": None}, 0),
        ({}, 0),
        (None, 0),
    ],
)
def test_a_limit_counts_before_a_request(resources: Any, amount: int) -> None:
    asking = pod(spec={"containers": [{"name": "c", "resources": resources}], "initContainers": None})
    assert effective_request(asking, KEYS.gpu_mem) == amount
    assert is_model_pod(asking, KEYS) == (amount > 0)


def test_an_init_container_alone_makes_a_model_pod() -> None:
    loader = {"name": "loader", "resources": {"limits": {KEYS.gpu_mem: "3"}}}
    asking = pod(spec={"containers": [{"name": "c"}], "initContainers": [loader]})
    assert is_model_pod(asking, KEYS)
    assert effective_request(asking, KEYS.gpu_mem) == 3


def test_sidecars_add_up_beside_what_starts_after_them() -> None:
    def container(amount: str, **more: Any) -> dict[str, Any]:
        return {"name": "c", "resources": {"limits": {KEYS.gpu_mem: amount}}, **more}

    one, two = container("1", restartPolicy="Always"), container("2", restartPolicy="Always")
    spec = {"containers": [container("4")], "initContainers": [one, two]}
    assert effective_request(pod(spec=spec), KEYS.gpu_mem) == 7
    spec["initContainers"] = [one, container("9"), two]
    assert effective_request(pod(spec=spec), KEYS.gpu_mem) == 10
    spec["initContainers"] = [one, container("9"), two, container("8")]
    assert effective_request(pod(spec=spec), KEYS.gpu_mem) == 11


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1Ki", 2**10),
        ("1Mi", 2**20),
        ("1Gi", 2**30),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("1k", 10**3),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1000m", 1),
        ("2000000u", 2),
        ("3000000000n", 3),
        ("2e+3", 2000),
        ("5000e-3", 5),
        (" 7 ", 7),
        ("0" * 63 + "1", 1),
    ],
)
def test_every_suffix(text: str, value: int) -> None:
    assert parse_bytes(text) == value


def test_amounts_are_exact_and_rounded_up_only_at_the_end() -> None:
    assert parse_bytes("0") == 0
    assert ceil_units("1.5") == 2
    assert ceil_units("2") == 2
    assert ceil_units("0.0001", per_unit=1000) == 1
    assert ceil_units("2000m") == 2
    assert parse_quantity("0.1") * 10 == 1
    with pytest.raises(InvalidValue, match="^'" + "9" * 64 + "' is not a quantity"):
        parse_quantity("9" * 70)


@pytest.mark.parametrize(
    ("count", "text"),
    [(1024, "1 KiB"), (1536, "1.5 KiB"), (2**40, "1 TiB"), (-(2**20), "-1 MiB"), (2**20 - 1, "1024 KiB")],
)
def test_amounts_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
