"""Bodies checked: short ones in their turn, longer ones beside the loop, the longest in another process.

    python -m proxy.downstream.rest.checking SOCKET

A check holds the interpreter's lock for as long as the library takes to read the text, up to 100 ms for the
largest: in a thread the loop would stand still for it. The process is started when it is needed for the first
time, and ends with its socket. The argument is a descriptor.
"""

import asyncio
import logging
import pickle
import socket
import struct
import subprocess
import sys
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from berth.contract.quantity import format_bytes
from berth.runtime.logs import fields
from proxy.policy import cost
from proxy.policy.json_guard import check_generate, check_infer
from proxy.policy.model_facts import ModelFacts
from proxy.policy.refusal import Refusal, Why
from proxy.wire.http1 import HEADER_LENGTH, HttpError, write_lengths
from proxy.wire.packing import BadPacking, UnpacksTooLarge, unpack

log = logging.getLogger(__name__)

INLINE_BYTES: Final = 64 * 1024
# A check of so much takes less than 3 ms, for which the loop waits: longer bodies are worth another process.
_BESIDE_BYTES: Final = 256 * 1024
_ANSWER_SECONDS: Final = 30.0
# Of one replica.
_MOST_WAITING: Final = 256
_sizes = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be checked in a body. `left`: bytes of tensors that are still to come behind it."""

    is_infer: bool
    encoding: str
    header_length: int | None
    left: int
    facts: ModelFacts
    max_json_bytes: int
    json_flag: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The end of the head and the body, as far as it was buffered; and what the request costs Triton."""

    tail: bytes
    cost_bytes: int


def check(question: Question, raw: bytes) -> Checked:
    """What goes on in the place of a body. Raises Refusal or HttpError. Touches nothing else."""
    if question.encoding != "identity":
        raw = inflated(raw, question.encoding, question.max_json_bytes, question.json_flag)
    if not question.is_infer:
        body = check_generate(raw)
        return Checked(write_lengths(len(body), None) + body, cost.of_json(body))
    text, tensors, header_length = raw, b"", question.header_length
    if header_length is not None:
        if header_length > len(raw):
            raise HttpError(400, f"{HEADER_LENGTH} is above the body's length")
        text, tensors = raw[:header_length], raw[header_length:]
    binary = len(tensors) + question.left
    body = check_infer(text, question.facts, binary_bytes=binary)
    start = write_lengths(len(body) + binary, None if header_length is None else len(body))
    return Checked(start + body + tensors, cost.of_json(body) + cost.of_tensors(binary))


def inflated(data: bytes, encoding: str, limit: int, flag: str) -> bytes:
    """Unpack a body within a bound, which `flag` sets. Raises HttpError."""
    try:
        return unpack(data, encoding, limit)
    except BadPacking as error:
        raise HttpError(400, f"the body {error}") from error
    except UnpacksTooLarge as error:
        message = f"the body unpacks to more than {format_bytes(limit)} ({flag})"
        raise HttpError(413, message) from error


class Checker:
    """Checks beside the loop, one after the other: long checks take turns with it, not it with many of them.

    The replicas take turns: a small packed body may be as long to check as the largest, and one replica can have
    thousands of them here.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: OrderedDict[object, deque[asyncio.Future[None]]] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")
        self._helper: _Helper | None = None

    async def check(self, question: Question, body: bytes, whose: object) -> Checked:
        """As `check`, for a replica; raises Refusal too, where too many of its bodies wait for that."""
        await self._turn(whose)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._check, question, body)
        finally:
            self._next()

    async def _turn(self, whose: object) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        waiting = self._waiting.setdefault(whose, deque())
        if len(waiting) >= _MOST_WAITING:
            raise Refusal(Why.NO_ROOM, f"{_MOST_WAITING} bodies wait to be checked already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has just come
                self._next()
            raise

    def _next(self) -> None:
        """Of the replica whose turn it is, who has waited longest and still does."""
        while self._waiting:
            whose, waiting = self._waiting.popitem(last=False)
            turn = waiting.popleft()
            if waiting:
                self._waiting[whose] = waiting
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _check(self, question: Question, body: bytes) -> Checked:
        if len(body) <= _BESIDE_BYTES and question.encoding == "identity":
            return check(question, body)
        try:
            if self._helper is None:
                self._helper = _Helper()
            return self._helper.ask(question, body)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            log.warning("the checking process is gone", extra=fields(error=repr(error)))
            helper, self._helper = self._helper, None
            if helper is not None:
                helper.close()
            return check(question, body)


class _Helper:
    """The other process. One question at a time, from one thread."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "proxy.downstream.rest.checking", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def ask(self, question: Question, body: bytes) -> Checked:
        """As `check`; raises OSError or EOFError where the process is gone or hangs."""
        _send(self._socket, pickle.dumps(question), body)
        header, tail = _receive(self._socket)
        kind, *what = pickle.loads(header)  # noqa: S301  # our own process', over a socket that no other process has
        if kind == "checked":
            return Checked(tail, *what)
        raise Refusal(Why[what[0]], what[1]) if kind == "refused" else HttpError(*what)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _send(sock: socket.socket, head: bytes, body: bytes) -> None:
    sock.sendall(_sizes.pack(len(head), len(body)) + head)
    sock.sendall(body)


def _receive(sock: socket.socket) -> tuple[bytes, bytes]:
    """Raises EOFError at the other's end."""
    head_bytes, body_bytes = _sizes.unpack(_exactly(sock, _sizes.size))
    return bytes(_exactly(sock, head_bytes)), bytes(_exactly(sock, body_bytes))


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data, at = bytearray(size), 0
    view = memoryview(data)
    while at < size:
        count = sock.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    view.release()
    return data


def _answer(question: Question, body: bytes) -> tuple[Any, bytes]:
    try:
        checked = check(question, body)
    except Refusal as error:
        return ("refused", error.why.name, str(error)), b""
    except HttpError as error:
        return ("error", error.status, str(error)), b""
    return ("checked", checked.cost_bytes), checked.tail


def main(sock: socket.socket) -> None:
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            question, body = _receive(sock)
            header, tail = _answer(pickle.loads(question), body)  # noqa: S301
            _send(sock, pickle.dumps(header), tail)
            del body, tail


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        main(asked)
