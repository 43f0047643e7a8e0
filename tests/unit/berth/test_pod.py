"""What a pod requests."""

from typing import Any

import pytest

from berth.contract.errors import InvalidPod
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid
from berth.contract.keys import Keys
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
from berth.contract.quantity import parse_bytes

KEYS = Keys()


GIB = 1024**3


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


A, B, C = GpuUuid("GPU-a"), GpuUuid("GPU-b"), GpuUuid("GPU-c")


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
