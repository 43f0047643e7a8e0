"""What must hold for any bytes at all: each target takes some and raises AssertionError where it does not."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import h2.config
import h2.connection
import h2.events
import h11
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from proxy.policy.json_guard import MAX_DEPTH, check_infer
from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.policy.refusal import Refusal
from proxy.request.messages import CONFIG, INFER, STREAM_INFER, AnswerReader, InferGuard, ModelFields
from proxy.wire import protobuf
from proxy.wire.grpc_status import GrpcError
from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.events import Data, Ended, Headers, WholeRequest
from proxy.wire.h2.receiving import CONNECTION_WINDOW
from proxy.wire.h2.server import ServerCodec
from proxy.wire.h2.stream import Stream
from tests.fakes import h2_codecs
from tests.fakes.data_plane import GrpcPair, RestPair, settle, triton_at_hand
from tests.fuzz.preamble import preamble

OWN = ModelFields(Names(b"own", b"own-0123456789ab"))
FACTS = ModelFacts(fixed_outputs=frozenset({"FIXED"}))
_OWN_TARGET = re.compile(rb"/v2/models/own(/versions/[0-9]+)?(/[a-z_]+)?")
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def rest(data: bytes) -> None:
    """HTTP/1.1 from a client, cut in two: what goes on is HTTP, and for the own model."""
    cut = data[0] * len(data) // 256 if data else 0
    _run(_rest((data[1 : 1 + cut], data[1 + cut :])))


async def _rest(pieces: tuple[bytes, bytes]) -> None:
    with RestPair.triton_at_hand():
        pair = RestPair(facts=FACTS)
        for piece in pieces:
            if piece and pair.to_client.open:
                pair.client.data_received(piece)
            for _ in range(20):
                await settle()
                done = [u for u in pair.tritons if u.request is not None and u.request_done]
                for upstream in done:
                    upstream.data_received(_ANSWER)
                if not done:
                    break
        for wire_ in pair.to_triton:
            _require_own_http(wire_.sent)


def _require_own_http(sent: bytes) -> None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(sent)
    request, body = None, b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            assert _OWN_TARGET.fullmatch(event.target), event.target
            keys = [value for name, value in event.headers if name == b"berth-inference-key"]
            assert keys == [b"k"], keys
            request, body = event, b""
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            _require_checked_body(request, body)
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
        else:
            return


def _require_checked_body(request: h11.Request, body: bytes) -> None:
    """What Triton takes for JSON, by the head that it gets, is what may be there, whoever reads it."""
    headers = dict(request.headers)
    assert b"content-encoding" not in headers
    assert [name for name, _ in request.headers].count(b"inference-header-content-length") <= 1
    size = int(headers.get(b"inference-header-content-length", len(body)))
    assert size <= len(body)
    if request.target.endswith(b"/infer"):
        _require_one_reading(body[:size], len(body))
    elif request.method == b"POST":
        assert _read(body, dict) == _read(body, _first_of_equals)


def grpc(data: bytes) -> None:
    """HTTP/2 frames from a client behind a proper preface: what goes on is HTTP/2, and for the own model."""
    _run(_grpc(data))


async def _grpc(data: bytes) -> None:
    with triton_at_hand():
        pair = GrpcPair(facts=FACTS)
        pair.client.data_received(frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK)
        if data:
            pair.receive(data)
        pair.end_turn()
        if pair.to_triton:
            _require_own_grpc(pair.to_triton[0].sent)


def _require_own_grpc(sent: bytes) -> None:
    triton = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    triton.initiate_connection()
    bodies: dict[int, bytes] = {}
    for event in triton.receive_data(sent):
        match event:
            case h2.events.RequestReceived():
                path = dict(event.headers)[b":path"]
                assert path.startswith(b"/inference.GRPCInferenceService/Model"), path
                bodies[event.stream_id] = b""
            case h2.events.DataReceived():
                bodies[event.stream_id] += event.data
    for body in bodies.values():
        while len(body) >= 5 and len(body) >= 5 + int.from_bytes(body[1:5]):
            size = int.from_bytes(body[1:5])
            with suppress(DecodeError):
                assert pb.ModelInferRequest.FromString(body[5 : 5 + size]).model_name == "own"
            body = body[5 + size :]


def codec(data: bytes) -> None:
    """What an HTTP/2 peer says, cut in two: told as if it had come whole, with no byte lost or owed twice."""
    if len(data) < 2:
        return
    said = data[2:]
    cut = data[1] * len(said) // 256
    start = _a_server if data[0] & 1 else _a_client
    assert _heard(start(), [said[:cut], said[cut:]]) == _heard(start(), [said])


def _a_server() -> H2Codec[Any, Any]:
    server = h2_codecs.introduced()
    server.receive(frames.headers(3, h2_codecs.head(), end_stream=False))
    return server


def _a_client() -> H2Codec[Any, Any]:
    client = h2_codecs.client()
    client.receive(frames.settings({}) + frames.SETTINGS_ACK)
    client.send_call(h2_codecs.head(), b"1")
    client.receive(frames.headers(1, hpack.NO_TABLE + h2_codecs.OK, end_stream=True))
    for _ in range(3):
        client.send_call(h2_codecs.head(), b"x" * 100_000)
    return client


def _heard(codec: H2Codec[Any, Any], pieces: list[bytes]) -> dict[int, list[Any]]:
    read = [event for piece in pieces for event in codec.receive(piece)]
    streams = {event.stream for event in read if isinstance(event, WholeRequest | Headers | Data)}
    _require_balance(streams)
    for event in read:
        if isinstance(event, Data):
            event.release()
    _require_balance(streams)
    assert not any(stream.held for stream in streams)
    assert 0 < codec.receive_left <= CONNECTION_WINDOW
    if isinstance(codec, ServerCodec):
        for stream in list(codec.streams.values()):
            codec.send_answer(stream, h2_codecs.OK, b"answer", h2_codecs.DONE)
    out = h2_codecs.output(codec)
    at = out.startswith(frames.PREFACE) * len(frames.PREFACE)
    while at < len(out):
        high, low, *_ = frames.read_head(out, at)
        at += frames.HEAD_BYTES + (high << 8 | low)
    assert at == len(out)
    assert codec.is_closed == any(isinstance(event, Ended) for event in read)
    assert all(event is read[-1] for event in read if isinstance(event, Ended))
    codec.lost()
    assert not codec.streams
    return h2_codecs.by_stream(read)


def _require_balance(streams: Iterable[Stream]) -> None:
    for stream in streams:
        assert stream.receive_left + stream.owed + stream.held == stream.window
        assert min(stream.receive_left, stream.owed, stream.held) >= 0


def infer_json(data: bytes) -> None:
    """A JSON body: what goes on has no shape beyond its size, no depth, no shared memory, and the right types."""
    try:
        written = check_infer(data, FACTS)
    except Refusal:
        return
    _require_one_reading(written, len(data))
    assert check_infer(written, FACTS) == written


def _require_one_reading(text: bytes, size: int) -> None:
    value = _read(text, dict)
    assert value == _read(text, _first_of_equals)
    _require_harmless(value, size)


# A string, or a number that holds NaN or Infinity: of some of those Triton says that they are none.
_NOT_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]*(?:NaN|Inf)[-+.\w]*')


def _read(text: bytes, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
    finite = _NOT_FINITE.sub(lambda found: found[0] if found[0].startswith(b'"') else b"0.5", text)
    return json.loads(finite.decode(), object_pairs_hook=pairs)


def _first_of_equals(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As a reader that takes the first of two equal keys."""
    return dict(reversed(pairs))


def _require_harmless(value: Any, size: int) -> None:
    assert isinstance(value, dict)
    assert _depth(value) <= MAX_DEPTH
    for tensor in [*value["inputs"], *value.get("outputs", [])]:
        assert isinstance(tensor["name"], str)
        parameters = tensor.get("parameters", {})
        assert not any(key.startswith("shared_memory_") for key in parameters)
        assert not any(isinstance(one, dict | list) or one is None for one in parameters.values())
    for tensor in value["inputs"]:
        _require_plain_data(tensor.get("data", []))
        product = 1
        for extent in tensor["shape"]:
            assert type(extent) is int
            assert extent >= 0
            product *= max(1, extent)
        assert product <= size


def _require_plain_data(data: Any) -> None:
    assert isinstance(data, list), data
    for one in data:
        if isinstance(one, list):
            _require_plain_data(one)
        else:
            assert isinstance(one, bool | int | float | str), one


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, children), default=0) if isinstance(value, dict | list) else 0


def message(data: bytes) -> None:
    """A ModelInferRequest: what passes whole passes in pieces, names the own model only, and Triton's for it."""
    guard = InferGuard(OWN, lambda: FACTS)
    try:
        guard.whole(data)
    except GrpcError:
        return
    walker = protobuf.InferReader()
    step = max(1, len(data) // 3)
    try:
        for start in range(0, len(data), step):
            walker.feed(data[start : start + step])
        walker.finish()
    except protobuf.BadMessage:
        pass  # the walk looks into tensors too, which the quick way need not
    else:
        assert walker.name == OWN.names.public
    try:
        parsed = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return  # Triton refuses it as well
    assert parsed.model_name == "own"
    assert pb.ModelInferRequest.FromString(data + OWN.appended).model_name == OWN.names.server.decode()
    for tensor in (*parsed.inputs, *parsed.outputs):
        assert not any(key.startswith("shared_memory_") for key in tensor.parameters)


def answer(data: bytes) -> None:
    """Whatever Triton says, cut in two: the same goes on, and tensors keep all their bytes."""
    if len(data) < 2:
        return
    said, method = data[2:], (INFER, STREAM_INFER, CONFIG)[data[0] % 3]
    cut, is_decoupled = data[1] * len(said) // 256, method == STREAM_INFER and data[0] > 127
    whole, halves = (AnswerReader(method, OWN, is_decoupled=is_decoupled) for _ in range(2))
    first, second = halves.feed(said[:cut]), halves.feed(said[cut:])
    assert whole.feed(said) == (first[0] + second[0], first[1] + second[1])
    if OWN.names.server not in said:
        assert said.startswith(first[0] + second[0])


def _run(work: Coroutine[Any, Any, None]) -> None:
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "preamble": preamble,
    "rest": rest,
    "grpc": grpc,
    "codec": codec,
    "json": infer_json,
    "message": message,
    "answer": answer,
}
