"""Requests at a rate, of each kind of client, and what has become of every one of them.

An open loop: what is due is sent, whatever becomes of what was sent before. No client tries anything again but for what
gRPC's own channels do by themselves. Each request has bytes of its own, so that an answer that is another's is seen.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Final, Protocol

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from bench.scaler.models import echo_request, echoed
from bench.scaler.traffic import Client, Lost
from berth.contract.endpoint import Endpoint

_ANSWER_SECONDS: Final = 90.0
# Channels to one address have a connection each, as those of several pods have.
_CHANNEL: Final = (("grpc.use_local_subchannel_pool", 1),)
# Of words that differ in numbers only, so many are kept.
_WORDS: Final = 200


class Refused(Exception):
    """In the protocol's proper form, and with the word that it may be asked again."""


@dataclass
class Fates:
    """Of many requests. Those that had no answer, by kind of client and the words that it had instead."""

    cycles: int = 0
    sent: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, other: "Fates") -> None:
        self.cycles += other.cycles
        self.sent += other.sent
        self.answered += other.answered
        self.refused += other.refused
        self.lost += other.lost
        self.seconds += other.seconds


class Caller(Protocol):
    """One client."""

    name: str

    async def ask(self, data: Sequence[int]) -> None:
        """Returns when these bytes have come back. Raises Refused or Lost."""

    async def close(self) -> None: ...


class RestCaller:
    """Keeps its connections, or makes one for each request."""

    def __init__(self, model: str, client: Client, *, keeps: bool) -> None:
        self._model, self._client = model, client
        self._headers = {} if keeps else {"Connection": "close"}
        self.name = "REST kept" if keeps else "REST new"
        self.close = client.close

    async def ask(self, data: Sequence[int]) -> None:
        head, _, body = echo_request(self._model, data).partition(b"\r\n")
        more = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        answer = await self._client.ask(b"%b\r\n%b%b" % (head, more.encode(), body))
        words = f"{answer.status} {answer.body[:_WORDS].decode(errors='replace')}"
        if answer.status == 503 and answer.retry_after:
            raise Refused(words)
        if answer.status != 200 or echoed(answer.body) != list(data):
            raise Lost(words)


class GrpcCaller:
    """A channel, with one connection at a time."""

    name = "gRPC"

    def __init__(self, model: str, at: Endpoint) -> None:
        self._model = model
        self._channel = grpc.aio.insecure_channel(str(at), options=_CHANNEL)
        self._infer = GRPCInferenceServiceStub(self._channel).ModelInfer

    async def ask(self, data: Sequence[int]) -> None:
        request = pb.ModelInferRequest(model_name=self._model, raw_input_contents=[bytes(data)])
        request.inputs.add(name="IN", datatype="UINT8", shape=[len(data)])
        try:
            answer = await self._infer(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            words = f"{error.code().name} {(error.details() or '')[:_WORDS]}"
            trailers = {name for name, _ in error.trailing_metadata() or ()}
            is_refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "retry-after" in trailers
            raise (Refused if is_refused else Lost)(words) from error
        if list(answer.raw_output_contents) != [bytes(data)]:
            raise Lost(f"another's answer, {len(answer.raw_output_contents)} tensors")

    async def close(self) -> None:
        await self._channel.close()


class Load:
    """So many requests a second between `start` and `stop`, by all callers in turn. `phase`: where those that are sent
    now are counted."""

    def __init__(self, callers: Sequence[Caller], per_second: float) -> None:
        self._callers, self._per_second = callers, per_second
        self._turns: Iterator[Caller] = cycle(callers)
        self._numbers = count()
        self._sending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self.fates: dict[str, Fates] = {}
        self.phase = ""

    def start(self) -> None:
        self._over.clear()
        self._sending = asyncio.create_task(self._send())

    async def stop(self) -> None:
        """Returns when everything has been answered, or has not."""
        self._over.set()
        if self._sending is not None:
            await self._sending
        while self._asking:
            await asyncio.wait(self._asking)

    async def close(self) -> None:
        """At once: what is under way then is neither answered nor lost."""
        tasks = [*self._asking, *([self._sending] if self._sending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for caller in self._callers:
            await caller.close()

    async def _send(self) -> None:
        began, sent = time.monotonic(), 0
        while not self._over.is_set():
            due = int((time.monotonic() - began) * self._per_second)
            for _ in range(due - sent):
                task = asyncio.create_task(self._ask(next(self._turns)))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            sent = due
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 1 / min(self._per_second, 100))

    async def _ask(self, caller: Caller) -> None:
        fates = self.fates.setdefault(self.phase, Fates())
        fates.sent += 1
        began = time.monotonic()
        try:
            await caller.ask(next(self._numbers).to_bytes(4))
        except Refused as error:
            fates.refused[f"{caller.name}: {error}"] += 1
        except Exception as error:  # whatever else it is, it is no answer
            words = str(error) if isinstance(error, Lost) else repr(error)
            fates.lost[f"{caller.name}: {words}"] += 1
        else:
            fates.answered += 1
            fates.seconds.append(time.monotonic() - began)
