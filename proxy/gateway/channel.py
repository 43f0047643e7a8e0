"""A stream socket between two processes: JSON, one object a line, with descriptors (unix(7), SCM_RIGHTS)."""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

_READ_BYTES: Final = 256 * 1024
# Of one message; the system takes 253.
MOST_DESCRIPTORS: Final = 16


class Channel:
    """`take` gets each object with its descriptors, which are its own from then on; `lost` is told of the end, once."""

    def __init__(
        self, sock: socket.socket, take: Callable[[dict[str, Any], list[int]], None], lost: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._socket, self._take, self._lost = sock, take, lost
        self._loop = asyncio.get_running_loop()
        self._input = b""
        self._descriptors: deque[int] = deque()
        # What has not been sent yet: bytes, and what goes with the first of them.
        self._output: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """The descriptors are copied: whoever calls keeps its own."""
        if self._socket.fileno() < 0:
            return
        line = (
            json.dumps({**message, "descriptors": len(descriptors)}, separators=(",", ":")).encode() + b"\n"
        )
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
            message = json.loads(line)
            count = message.pop("descriptors")
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
