"""The isolation tables, held against Triton's own descriptor and routes."""

import random

import pytest
from tritonclient.grpc import service_pb2 as pb

from proxy.policy.infer import is_own
from proxy.policy.routes import RPC_RULES, SERVICE, Route, Verdict, decide_rest, decide_rpc
from proxy.wire import protobuf
from proxy.wire.headers import is_forwarded


def test_every_rpc_of_triton_has_a_verdict_and_no_other_is_known() -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    declared = {f"/{SERVICE}/{method.name}" for method in service.methods}
    listed = {method for method in RPC_RULES if method.startswith(f"/{SERVICE}/")}
    assert declared == listed
    assert decide_rpc(f"/{SERVICE}/SomethingNew") is Verdict.DENY


REST = {
    ("GET", "/v2/health/live"): Verdict.LOCAL,
    ("GET", "/v2/health/ready"): Verdict.LOCAL,
    ("GET", "/v2"): Verdict.FILTER,
    ("GET", "/v2/models/m"): Verdict.ALLOW,
    ("GET", "/v2/models/m/versions/1"): Verdict.ALLOW,
    ("GET", "/v2/models/m/ready"): Verdict.ALLOW,
    ("GET", "/v2/models/m/versions/12/ready"): Verdict.ALLOW,
    ("POST", "/v2/models/m/infer"): Verdict.ALLOW,
    ("POST", "/v2/models/m/versions/1/infer"): Verdict.ALLOW,
    ("POST", "/v2/models/m/generate"): Verdict.ALLOW,
    ("POST", "/v2/models/m/generate_stream"): Verdict.ALLOW,
    ("GET", "/v2/models/m/config"): Verdict.ALLOW,
    ("GET", "/v2/models/m/stats"): Verdict.ALLOW,
    ("GET", "/v2/models/stats"): Verdict.FILTER,
    ("GET", "/v2/models/m/trace/setting"): Verdict.BLOCK,
    ("POST", "/v2/models/m/trace/setting"): Verdict.BLOCK,
    ("POST", "/v2/models/m/versions/1/trace/setting"): Verdict.DENY,
    ("GET", "/v2/trace/setting"): Verdict.BLOCK,
    ("POST", "/v2/logging"): Verdict.BLOCK,
    ("POST", "/v2/repository/index"): Verdict.LOCAL,
    ("POST", "/v2/repository/any/index"): Verdict.LOCAL,
    ("POST", "/v2/repository/models/m/load"): Verdict.BLOCK,
    ("POST", "/v2/repository/models/m/unload"): Verdict.BLOCK,
    ("POST", "/v2/repository/r/models/m/load"): Verdict.BLOCK,
    ("GET", "/v2/systemsharedmemory/status"): Verdict.BLOCK,
    ("GET", "/v2/systemsharedmemory/region/r/status"): Verdict.BLOCK,
    ("POST", "/v2/systemsharedmemory/region/r/register"): Verdict.BLOCK,
    ("POST", "/v2/systemsharedmemory/unregister"): Verdict.BLOCK,
    ("POST", "/v2/systemsharedmemory/region/r/unregister"): Verdict.BLOCK,
    ("GET", "/v2/cudasharedmemory/status"): Verdict.BLOCK,
    ("POST", "/v2/cudasharedmemory/region/r/register"): Verdict.BLOCK,
    ("POST", "/v2/cudasharedmemory/unregister"): Verdict.BLOCK,
}


@pytest.mark.parametrize(("request_line", "verdict"), REST.items(), ids=lambda value: str(value))
def test_every_route_of_triton(request_line: tuple[str, str], verdict: Verdict) -> None:
    assert decide_rest(*request_line).verdict is verdict


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/v2/",
        "//v2",
        "/v2/models",
        "/v2/models/",
        "/v2/models/m/",
        "/v2/models//infer",
        "/v2/models/m//infer",
        "/v2/models/%6d/infer",
        "/v2/models/m%2Finfer",
        "/v2/models/../models/m",
        "/v2/models/m/../x",
        "/v2/models/..",
        "/v2/models/m/infer/",
        "/V2/models/m/infer",
        "/v2/models/m/INFER",
        "/v2/models/m\x00/infer",
        "/v2/models/ü",
        "http://h/v2/models/m",
        "/v2/models/m/versions/x",
        "/v2/models/m/versions//infer",
        "/metrics",
        "/ping",
        "/invocations",
        "/v1/chat/completions",
        "/v2/models/m/versions/" + "9" * 19,
    ],
)
def test_everything_else_is_denied(path: str) -> None:
    for method in ("GET", "POST"):
        assert decide_rest(method, path).verdict is Verdict.DENY, path


def test_another_method_is_denied_with_the_right_one() -> None:
    decision = decide_rest("DELETE", "/v2/models/m/infer")
    assert (decision.verdict, decision.allowed_methods) == (Verdict.DENY, ("POST",))


def test_what_a_path_names() -> None:
    decision = decide_rest("POST", "/v2/models/a.b_c-1/versions/7/infer")
    assert (decision.route, decision.model, decision.version) == (Route.INFER, "a.b_c-1", "7")


@pytest.mark.parametrize("name", ["M", "m ", "m\x00", "m\x00x", "", "mm"])
def test_only_the_very_name_is_the_own(name: str) -> None:
    assert not is_own(name.encode(), b"m")
    assert is_own(b"m", b"m")


@pytest.mark.parametrize(
    "name",
    [
        "Berth-Admin-Key",
        "triton-grpc-protocol-berth-admin-key",
        "endpoint-load-metrics-format",
        "X-Vertex-Ai-Triton-Redirect",
        "X-Amzn-SageMaker-Target-Model",
        "Connection",
        "Transfer-Encoding",
        "Host",
    ],
)
def test_control_headers_do_not_go_on(name: str) -> None:
    assert not is_forwarded(name)
    assert is_forwarded("traceparent")


def random_request(rng: random.Random) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=rng.choice(["m", "other", ""]), id="i" * rng.randrange(3))
    for _ in range(rng.randrange(3)):
        tensor = request.inputs.add(name="I", datatype="INT32", shape=[rng.randrange(2**40)])
        if rng.random() < 0.3:
            key = rng.choice(
                ["shared_memory_region", "shared_memory_offset", "binary_data", "classification"]
            )
            tensor.parameters[key].int64_param = 1
        tensor.contents.int_contents.extend(range(rng.randrange(4)))
    for _ in range(rng.randrange(2)):
        tensor = request.outputs.add(name="O")
        if rng.random() < 0.3:
            tensor.parameters[rng.choice(["shared_memory_byte_size", "classification"])].string_param = "s"
    request.raw_input_contents.append(rng.randbytes(rng.randrange(20)))
    return request


def asks_for_shared_memory(message: bytes, pieces: int = 1) -> bool:
    walker = protobuf.InferReader()
    for start in range(0, len(message), size := max(1, len(message) // pieces)):
        walker.feed(message[start : start + size])
    walker.finish()
    return walker.shared_memory is not None


@pytest.mark.parametrize("seed", range(200))
def test_our_reading_is_protobufs_reading(seed: int) -> None:
    """Also for messages joined end to end, where the last of a repeated field counts and maps merge."""
    rng = random.Random(seed)
    message = b"".join(random_request(rng).SerializeToString() for _ in range(rng.randrange(1, 4)))
    message += protobuf.encode_bytes(99, rng.randbytes(5))  # an unknown field
    parsed = pb.ModelInferRequest.FromString(message)
    assert protobuf.model_name(message) == parsed.model_name.encode()
    wanted = any(
        key.startswith("shared_memory_")
        for tensor in (*parsed.inputs, *parsed.outputs)
        for key in tensor.parameters
    )
    assert asks_for_shared_memory(message, rng.randrange(1, 9)) is wanted


@pytest.mark.parametrize("seed", range(100))
def test_damaged_messages_are_refused_and_never_another_error(seed: int) -> None:
    rng = random.Random(seed)
    message = bytearray(random_request(rng).SerializeToString())
    for _ in range(rng.randrange(1, 5)):
        message[rng.randrange(len(message))] = rng.randrange(256)
    damaged = bytes(message[: rng.randrange(len(message) + 1)])
    try:
        name, shared = protobuf.model_name(damaged), asks_for_shared_memory(damaged)
    except protobuf.BadMessage:
        return
    try:
        parsed = pb.ModelInferRequest.FromString(damaged)
    except Exception:  # protobuf refuses more: names that are not UTF-8
        return
    assert name == parsed.model_name.encode()
    tensors = (*parsed.inputs, *parsed.outputs)
    assert shared or not any(k.startswith("shared_memory_") for t in tensors for k in t.parameters)


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x08\x01",
        b"\x0b",
        b"\x80" * 11,
        b"\x00\x01",
        b"\x0d\x01\x02",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    ],
)
def test_messages_that_parsers_could_read_differently_are_refused(message: bytes) -> None:
    with pytest.raises(protobuf.BadMessage):
        protobuf.model_name(message)
