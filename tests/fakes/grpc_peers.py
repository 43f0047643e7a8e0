"""A reference client and a reference server (python-hyper/h2) on either side of a gRPC front end's pair.

Both raise on anything that HTTP/2 does not allow.
"""

from collections.abc import Callable, Iterable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from h2.settings import SettingCodes
from tritonclient.grpc import service_pb2 as pb

from proxy.request.messages import INFER, framed
from tests.fakes.data_plane import GrpcPair


def request(model: str = "own", *, size: int = 3, id: str = "", **parameters: str) -> bytes:
    message = pb.ModelInferRequest(model_name=model, id=id)
    tensor = message.inputs.add(name="IN", datatype="UINT8", shape=[size])
    for key, value in parameters.items():
        tensor.parameters[key].string_param = value
    message.raw_input_contents.append(b"x" * size)
    encoded: bytes = message.SerializeToString()
    return encoded


class Client:
    """A reference client on one side of the proxy."""

    def __init__(self, pair: GrpcPair) -> None:
        self.pair = pair
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.headers: dict[int, list[tuple[bytes, bytes]]] = {}
        self.data: dict[int, bytes] = {}
        self.resets: dict[int, int] = {}
        self.ended: set[int] = set()
        self.gone_away: int | None = None

    def call(self, method: str = INFER, *, fields: Iterable[tuple[str, str]] = (), **more: str) -> int:
        """`fields`: of the head, as they are; `more`: with - for _ in their names."""
        stream: int = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "h"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *((name.replace("_", "-"), value) for name, value in more.items()),
            *fields,
        ]
        self.h2.send_headers(stream, headers)
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False, pad: int | None = None) -> None:
        size = self.h2.max_outbound_frame_size - 300
        pieces = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        for index, piece in enumerate(pieces):
            self.h2.send_data(stream, piece, end_stream=end and index == len(pieces) - 1, pad_length=pad)

    def exchange(self) -> None:
        """Deliver what both sides have written to each other."""
        if (out := self.h2.data_to_send()) and self.pair.to_client.open:
            self.pair.receive(out)
        self.pair.end_turn()
        for event in self.h2.receive_data(self.pair.to_client.take()):
            self.take(event)
        if (out := self.h2.data_to_send()) and self.pair.to_client.open:
            self.pair.receive(out)

    def take(self, event: Any) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                self.headers.setdefault(event.stream_id, []).extend(event.headers)
            case h2.events.DataReceived():
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamReset():
                self.resets[event.stream_id] = event.error_code
            case h2.events.StreamEnded():
                self.ended.add(event.stream_id)
            case h2.events.ConnectionTerminated():
                self.gone_away = event.error_code

    def status(self, stream: int) -> int | None:
        found = dict(self.headers.get(stream, [])).get(b"grpc-status")
        return None if found is None else int(found)


class Triton:
    """A reference server on the other side. It calls the streams what the client calls them."""

    def __init__(self, pair: GrpcPair, index: int = 0) -> None:
        """`index`: of the proxy's connections to Triton."""
        self.pair, self._index = pair, index
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        told = {SettingCodes.MAX_CONCURRENT_STREAMS: 2**31 - 1, SettingCodes.MAX_HEADER_LIST_SIZE: 16_384}
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=told)
        self.h2.initiate_connection()
        self.calls: dict[int, dict[bytes, bytes]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: set[int] = set()
        self._clients: dict[int, int] = {}

    def _named(self, id: int) -> int:
        """A stream as the client calls it; one that was over before it was seen has no such name."""
        if len(self.pair.tritons) <= self._index:
            return -id
        for stream in self.pair.tritons[self._index].codec.streams.values():
            self._clients.setdefault(stream.id, stream.owner.stream.id)
        return self._clients.get(id, -id)

    def own(self, stream: int) -> int:
        """What is called so here."""
        if stream < 0:
            return -stream
        return next((id for id, named in self._clients.items() if named == stream), stream)

    def exchange(self) -> None:
        if len(self.pair.tritons) <= self._index:
            return
        self._named(0)
        for event in self.h2.receive_data(self.pair.to_triton[self._index].take()):
            stream = self._named(getattr(event, "stream_id", None) or 0)
            match event:
                case h2.events.RequestReceived():
                    self.calls[stream] = dict(event.headers)
                case h2.events.DataReceived():
                    self.data[stream] = self.data.get(stream, b"") + event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    self.ended.add(stream)
                case h2.events.StreamReset():
                    self.resets.add(stream)
        if self.pair.to_triton[self._index].open:
            self.pair.tritons[self._index].data_received(self.h2.data_to_send())
            self.pair.end_turn()

    def answer(self, stream: int, *messages: bytes, status: str = "0") -> None:
        self.begin(stream)
        for message in messages:
            self.send(stream, framed(message))
        self.h2.send_headers(self.own(stream), [("grpc-status", status)], end_stream=True)

    def begin(self, stream: int) -> None:
        self.h2.send_headers(self.own(stream), [(":status", "200"), ("content-type", "application/grpc")])

    def send(self, stream: int, data: bytes, **more: Any) -> None:
        self.h2.send_data(self.own(stream), data, **more)

    def messages(self, stream: int) -> list[bytes]:
        """Those that are whole."""
        data, found = self.data.get(stream, b""), []
        while len(data) >= 5 and len(data) >= 5 + (size := int.from_bytes(data[1:5])):
            assert data[0] == 0
            found.append(data[5 : 5 + size])
            data = data[5 + size :]
        return found


class Both:
    def __init__(self, pair: GrpcPair) -> None:
        self.pair, self.client, self.triton = pair, Client(pair), Triton(pair)

    def exchange(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            self.client.exchange()
            self.triton.exchange()


Connect = Callable[..., Both]
