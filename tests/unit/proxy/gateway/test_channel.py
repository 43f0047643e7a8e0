"""Messages and descriptors between two processes, over a socket pair."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest

from berth.contract.gateway import ReplicaSpec
from proxy.gateway.channel import Channel
from proxy.gateway.spec import FromWorker, ReplicaStats, Spec, Status, ToWorker
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures
from tests.fakes.agent_control import replica_of
from tests.fakes.eventually import until


class End:
    """One end of a channel, and what it has received."""

    def __init__(self, sock: socket.socket, received: type[Any]) -> None:
        self.messages: list[tuple[Any, list[int]]] = []
        self.ends = 0
        self.channel = Channel(sock, received, self._take, self._lost)

    def _take(self, message: Any, descriptors: list[int]) -> None:
        self.messages.append((message, descriptors))

    def _lost(self) -> None:
        self.ends += 1


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[End, End]]:
    ours, theirs = socket.socketpair()
    first, worker = End(ours, FromWorker), End(theirs, ToWorker)
    try:
        yield first, worker
    finally:
        for end in (first, worker):
            end.channel.close()


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for one in ends:
            os.close(one)


def spec_of_many(count: int) -> Spec:
    replicas: tuple[ReplicaSpec, ...] = tuple(replica_of(f"uid-{number}") for number in range(count))
    return Spec(replicas=replicas, ejected={"uid-1": "why"}, draining=frozenset({"uid-2"}))


async def test_what_is_sent_arrives_in_order_however_large_it_is() -> None:
    figures = Figures(running=3)
    figures.grpc.answered("OK", 0.1)
    status = Status(stats={"a": ReplicaStats(figures, LoadReport(0.5, 1.0, 2.0, 3.0, 4, 5.0))})
    sent = [ToWorker(spec=spec_of_many(3000)), ToWorker(drain_all=True), ToWorker(config="x")]
    async with pair() as (first, worker):
        for message in sent:
            first.channel.send(message)
        worker.channel.send(FromWorker(status=status, crashes=(frozenset({"a"}),)))
        await until(lambda: len(worker.messages) == 3 and first.messages)
        assert [message for message, _ in worker.messages] == sent
        assert first.messages == [(FromWorker(status=status, crashes=(frozenset({"a"}),)), [])]


async def test_descriptors_belong_to_the_message_with_which_they_were_sent() -> None:
    async with pair() as (first, worker):
        with pipe() as one, pipe() as other:
            first.channel.send(ToWorker(limit_of="a"), one)
            first.channel.send(ToWorker(drain_all=True))
            first.channel.send(ToWorker(limit_of="b"), other)
            await until(lambda: len(worker.messages) == 3)
            for (_, got), ends in zip(worker.messages, (one, (), other), strict=True):
                assert [os.fstat(end).st_ino for end in got] == [os.fstat(end).st_ino for end in ends]
        for _, got in worker.messages:
            for end in got:
                os.close(end)


async def test_the_end_is_called_once_at_both_ends_and_nothing_is_sent_after_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with pair() as (first, worker):
        with pipe() as ends:
            first.channel.send(ToWorker(spec=spec_of_many(3000)), ends)  # more than the socket holds
            first.channel.close()
            first.channel.send(ToWorker(drain_all=True), ends)
        await until(lambda: worker.ends)
        worker.channel.close()
        assert (first.ends, worker.ends) == (1, 1)
        for _, got in worker.messages:
            for end in got:
                os.close(end)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("line", [b"[0,5]", b'[0,{"status":{"idle":[1]}}]', b"{}"])
def test_a_message_of_another_shape_is_refused(line: bytes) -> None:
    """A worker handles what clients send: the first process takes nothing from it but what the types say."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=tuple[int, FromWorker])
