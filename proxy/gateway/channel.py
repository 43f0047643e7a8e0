"""A stream socket between two processes: JSON, one message a line, with descriptors (unix(7), SCM_RIGHTS)."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

_READ_BYTES: Final = 256 * 1024
# Of one message; the system takes 253.
MOST_DESCRIPTORS: Final = 16

T = TypeVar("T")


class Channel(Generic[T]):
    """Messages of any type that msgspec encodes go out; those of type `received` come in.

    `take` gets each with its descriptors, which belong to it from then on; `lost` is called once, at the end.
    """

    def __init__(
        self,
        sock: socket.socket,
        received: type[T],
        take: Callable[[T, list[int]], None],
        lost: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._socket, self._take, self._lost = sock, take, lost
        self._decoder = msgspec.json.Decoder(tuple[int, received])  # type: ignore[valid-type]
        self._loop = asyncio.get_running_loop()
        self._input = b""
        self._descriptors: deque[int] = deque()
        # What has not been sent yet: bytes, and what goes with the first of them.
        self._output: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """The descriptors are copied: the caller keeps its own."""
        if self._socket.fileno() < 0:
            return
        line = msgspec.json.encode((len(descriptors), message)) + b"\n"
        self._output.append((line, tuple(os.dup(one) for one in descriptors)))
        if len(self._output) == 1:
            self._write()

    def _write(self) -> None:
        while self._output:
            data, descriptors = self._output[0]
            try:
                sent = socket.send_fds(self._socket, [data], list(descriptors))
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except OSError:
                self.close()
                return
            _close(descriptors)
            if sent < len(data):
                self._output[0] = (data[sent:], ())
            else:
                self._output.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            self.close()
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            count, message = self._decoder.decode(line)
            self._take(message, [self._descriptors.popleft() for _ in range(count)])

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, descriptors in self._output:
            _close(descriptors)
        self._output.clear()
        _close(self._descriptors)
        self._descriptors.clear()
        self._lost()


def _close(descriptors: Sequence[int] | deque[int]) -> None:
    for one in descriptors:
        os.close(one)
