"""Several replicas of models in one process, on one connection to Triton."""

import time
from collections.abc import AsyncIterator

import pytest
from tritonclient.grpc import service_pb2 as pb

from proxy.downstream.grpc import connection as grpc_client
from proxy.policy.names import Names
from proxy.policy.routes import SERVICE
from proxy.request.messages import INFER, STREAM_INFER, framed
from proxy.upstream import grpc as triton_grpc
from proxy.upstream.grpc import UpstreamConnection
from proxy.wire.h2 import frames, hpack
from tests.fakes.data_plane import GrpcPair, grpc_common, triton_at_hand
from tests.fakes.grpc_peers import Both, request

SERVERS = (b"own-000000000001", b"own-000000000002")


class Node:
    """Two replicas that their clients call the same, each with a client, and the Triton of both."""

    def __init__(self, **limits: int) -> None:
        self.lost: list[object] = []
        common = grpc_common(lost=self.lost.append)
        self.both = [
            Both(GrpcPair(common=common, names=Names(b"own", server), **limits)) for server in SERVERS
        ]
        self.replicas = [both.pair.replica for both in self.both]
        self.clients = [both.client for both in self.both]
        self.triton = self.both[0].triton
        # Streams of the two have different numbers, so that the reference server may call them as clients do.
        self.clients[1].send(self.clients[1].call(f"/{SERVICE}/ServerLive"), framed(b""), end=True)
        self.exchange()

    def exchange(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            for client in self.clients:
                client.exchange()
            self.triton.exchange()

    def ask(self, whose: int, method: str = INFER, *, size: int = 3, **metadata: str) -> int:
        client = self.clients[whose]
        stream = client.call(method, **metadata)
        while (whose == 0 and stream & 2) or (
            whose == 1 and not stream & 2
        ):  # each its own half of the numbers
            client.h2.reset_stream(stream)
            stream = client.call(method, **metadata)
        client.send(stream, framed(request(size=size)), end=method == INFER)
        self.exchange()
        return stream


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    with triton_at_hand():
        yield Node()


def answer_of(server: bytes, size: int = 3) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(model_name=server.decode(), id="7")
    answer.raw_output_contents.append(b"y" * size)
    return answer


@pytest.mark.parametrize("size", [0, 3, 15_000, 70_000, 300_000])
async def test_each_replica_is_asked_and_answers_under_its_own_names(node: Node, size: int) -> None:
    for _ in range(2):
        for whose, server in enumerate(SERVERS):
            stream = node.ask(whose, size=min(size, 15_000))
            (sent,) = node.triton.messages(stream)
            asked = pb.ModelInferRequest.FromString(request(size=min(size, 15_000)))
            asked.model_name = server.decode()
            assert pb.ModelInferRequest.FromString(sent) == asked
            answer = answer_of(server, size)
            node.triton.begin(stream)
            data = framed(answer.SerializeToString())
            for at in range(0, len(data), 16_000):
                node.triton.send(stream, data[at : at + 16_000])
                node.exchange(1)
            node.triton.h2.send_headers(node.triton.own(stream), [("grpc-status", "0")], end_stream=True)
            node.exchange()
            answer.model_name = "own"
            assert node.clients[whose].data[stream] == framed(answer.SerializeToString())
            assert node.clients[whose].status(stream) == 0
    assert len(node.both[0].pair.tritons) == 1


async def test_a_large_answer_in_one_frame_is_renamed_too(node: Node) -> None:
    node.clients[0].h2.increment_flow_control_window(2**20)
    stream = node.ask(0)
    node.clients[0].h2.increment_flow_control_window(2**20, stream)
    answer = answer_of(SERVERS[0], 100_000)
    data, own = framed(answer.SerializeToString()), node.triton.own(stream)
    head = hpack.encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
    whole = frames.headers(own, head, end_stream=False)
    whole += frames.head(len(data), frames.DATA, 0, own) + data
    whole += frames.headers(own, hpack.encode([(b"grpc-status", b"0")]), end_stream=True)
    node.both[0].pair.tritons[0].data_received(whole)
    node.exchange()
    answer.model_name = "own"
    assert node.clients[0].data[stream] == framed(answer.SerializeToString())


async def test_an_error_of_tritons_names_the_model_as_its_clients_do(node: Node) -> None:
    stream = node.ask(1)
    node.triton.h2.send_headers(
        node.triton.own(stream),
        [
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-status", "3"),
            ("grpc-message", f"no input for '{SERVERS[1].decode()}', {SERVERS[1].decode()} %25"),
        ],
        end_stream=True,
    )
    node.exchange()
    headers = dict(node.clients[1].headers[stream])
    assert (headers[b"grpc-status"], headers[b"grpc-message"]) == (b"3", b"no input for 'own', own %25")


async def test_a_lost_connection_is_reported_before_its_calls_are_refused(node: Node) -> None:
    stream = node.ask(1)
    running: list[int] = []
    node.both[0].pair.downstream.triton._lost = lambda replica: running.append(replica.admissions.running)
    gone = node.ask(0)
    node.clients[0].h2.reset_stream(gone, 8)  # given up is in Triton all the same
    node.exchange()
    node.both[0].pair.tritons[0].connection_lost(None)
    node.exchange(1)
    assert running == [1, 1]
    assert node.clients[1].status(stream) == 14
    assert [replica.admissions.running for replica in node.replicas] == [0, 0]


async def test_the_loss_of_an_idle_connection_is_not_reported(node: Node) -> None:
    stream = node.ask(0)
    node.triton.answer(stream, answer_of(SERVERS[0]).SerializeToString())
    node.exchange()
    node.both[0].pair.tritons[0].connection_lost(None)
    assert not node.lost


async def test_a_reader_that_stands_still_holds_up_no_other(node: Node) -> None:
    slow, quick = node.ask(0), node.ask(1)
    node.both[0].pair.to_client.stall(node.both[0].pair.client)
    node.triton.begin(slow)
    sent = 0
    while (room := node.triton.h2.local_flow_control_window(node.triton.own(slow))) > 0:
        node.triton.send(slow, b"z" * min(room, 16_000))
        sent += min(room, 16_000)
        assert sent < 2**20
        node.triton.exchange()
    node.triton.answer(quick, answer_of(SERVERS[1], 10_000).SerializeToString())
    node.exchange()
    assert node.clients[1].status(quick) == 0
    assert not node.both[0].pair.to_triton[0].paused


async def test_deadlines_of_one_replica_end_no_call_of_another(node: Node) -> None:
    other = node.ask(1)
    late = [node.ask(0, grpc_timeout="100m") for _ in range(50)]
    node.both[0].pair.downstream.deadlines.look(time.monotonic() + 1)
    node.exchange()
    assert {node.clients[0].status(stream) for stream in late} == {4}
    assert not node.triton.resets  # Triton goes on with them, and they keep their slots
    assert node.replicas[0].admissions.running == 50
    for stream in late:
        node.triton.answer(stream, b"")
    node.triton.answer(other, answer_of(SERVERS[1]).SerializeToString())
    node.exchange()
    assert node.clients[1].status(other) == 0
    assert [replica.admissions.running for replica in node.replicas] == [0, 0]


async def test_a_stream_that_was_given_up_keeps_its_slots_until_its_messages_are_answered() -> None:
    with triton_at_hand():
        node = Node(limit=2, depth=0)
        stream = node.ask(0, STREAM_INFER)
        node.clients[0].send(stream, framed(request()))
        node.exchange()
        node.clients[0].h2.reset_stream(stream, 8)
        node.exchange()
        assert node.replicas[0].admissions.running == 2
        node.triton.begin(stream)
        message = pb.ModelStreamInferResponse(infer_response=answer_of(SERVERS[0])).SerializeToString()
        for left in (1, 0):
            assert not node.triton.resets
            node.triton.send(stream, framed(message))
            node.exchange()
            assert node.replicas[0].admissions.running == left
        assert node.triton.resets == {stream}
        assert not node.both[0].pair.downstream.given_up


async def test_triton_that_cannot_be_reached_is_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_grpc, "_FIRST_PAUSE_SECONDS", 60.0)  # however slow the machine is
    with triton_at_hand():
        pair = GrpcPair()
        triton = pair.downstream.common.triton
        made: list[UpstreamConnection] = []

        def fail() -> None:
            upstream = triton.connection()
            made.append(upstream)
            upstream.transport = None  # it was never made
            upstream.abort("refused")

        fail()
        both = Both(pair)
        streams = []
        for _ in range(3):
            streams.append(both.client.call())
            both.client.send(streams[-1], framed(request()), end=True)
            both.exchange()
        assert {both.client.status(stream) for stream in streams} == {14}
        assert b"cannot be reached" in dict(both.client.headers[streams[0]])[b"grpc-message"]
        assert len(pair.tritons) == 1


async def test_long_checks_take_turns_with_the_loop(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, doubled or overtaken, and the client is not read meanwhile."""
    monkeypatch.setattr(grpc_client, "TIMESLICE_SECONDS", -1.0)
    client, pair = node.clients[0], node.both[0].pair
    stream = client.call(STREAM_INFER)
    messages = [request(id=str(number)) for number in range(20)]
    client.send(stream, b"".join(map(framed, messages)), end=True)
    last = client.call(f"/{SERVICE}/ServerLive")
    client.send(last, framed(b""), end=True)
    pair.client.data_received(client.h2.data_to_send())
    assert pair.to_client.paused
    node.exchange()
    assert not pair.to_client.paused
    sent = [pb.ModelInferRequest.FromString(one).id for one in node.triton.messages(stream)]
    assert sent == [str(number) for number in range(20)]
    assert stream in node.triton.ended
    assert client.status(last) == 0


async def test_calls_that_are_only_opened_count_against_their_replicas_memory() -> None:
    """A client may open a thousand on each of thousands of connections, with long headers, and say no more."""
    with triton_at_hand():
        node = Node(max_request_bytes=64 * 1024, max_inflight_bytes=64 * 1024)
        client, (replica, other) = node.clients[0], node.replicas
        streams = [client.call(STREAM_INFER, x_note="v" * 4000 + str(count)) for count in range(50)]
        node.exchange()
        assert replica.budget.used_bytes <= 64 * 1024
        refused = [stream for stream in streams if stream in client.ended]
        assert 30 < len(refused) < 50
        assert client.status(refused[0]) == 8
        assert not other.budget.used_bytes
        for stream in set(streams) - set(refused):
            client.h2.reset_stream(stream)
        node.exchange()
        assert not replica.budget.used_bytes
