"""The gateway's end of the control socket: the agent lists the replicas, the gateway reports drains and crashes.

Only processes of the gateway's own user, or root, are accepted; the last one to connect is the agent. While none is
connected, the last list stays in effect. A line that cannot be read is logged and changes nothing.
"""

import asyncio
import json
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import Any, Final, cast

from berth.contract.endpoint import UnixSocket
from berth.contract.errors import InvalidValue
from berth.runtime.errors import CannotStart
from berth.runtime.logs import fields
from proxy.gateway.control_plane import ControlPlane
from proxy.gateway.registry import read_replicas

log = logging.getLogger(__name__)

# Some thousands of replicas.
_LINE_BYTES: Final = 8 * 1024 * 1024
_MODE: Final = 0o660
LONGEST_DRAIN_SECONDS: Final = 3600.0


class ControlSocket:
    """`changed`: called when a message has changed what is wanted. `flush` sends what the control plane has for the agent."""

    def __init__(self, path: UnixSocket, control_plane: ControlPlane, changed: Callable[[], None]) -> None:
        self._path, self._control_plane, self._changed = path, control_plane, changed
        self._agent: _AgentSession | None = None
        # It has not listed the replicas yet.
        self._is_new = True
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "ControlSocket":
        """Raises CannotStart."""
        try:
            listening = _listen(self._path.path)
        except OSError as error:
            raise CannotStart(
                f"--control: cannot listen on {self._path}: {error.strerror or error}"
            ) from error
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _AgentSession(self), sock=listening
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        if self._agent is not None:
            self._agent.close()
        try:
            os.unlink(self._path.path)
        except OSError as error:
            log.debug("control socket is gone already", extra=fields(error=error))

    def connected(self, agent: "_AgentSession") -> None:
        before, self._agent, self._is_new = self._agent, agent, True
        if before is not None:
            before.close()
        log.info("agent connected")
        self.flush()

    def disconnected(self, agent: "_AgentSession") -> None:
        if agent is self._agent:
            self._agent = None
            log.warning("agent disconnected: its last list stays in effect")

    def flush(self) -> None:
        """Send what there is for the agent, if it is connected; else it waits."""
        messages = self._control_plane.messages
        while messages and self._agent is not None and self._agent.send(messages[0]):
            messages.popleft()

    def take(self, line: bytes) -> None:
        try:
            self._apply(_read(line))
        except InvalidValue as error:
            log.warning("the agent's message cannot be read", extra=fields(reason=error))
            return
        self._changed()

    def _apply(self, message: dict[str, Any]) -> None:
        """Raises InvalidValue, with nothing changed. Keys that are not known are ignored: the agent may be newer."""
        replicas = read_replicas(message["replicas"]) if "replicas" in message else None
        drain = _drain(message) if "drain" in message else None
        if replicas is not None:
            self._control_plane.list_replicas(replicas, is_new_agent=self._is_new)
            self._is_new = False
        if drain is not None:
            self._control_plane.drain(*drain, time.monotonic())


class _AgentSession(asyncio.Protocol):
    """One connection."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._transport: asyncio.Transport | None = None
        self._input: list[bytes] = []
        self._size = 0
        self._writable = True
        self._is_known = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = _peer_uid(transport.get_extra_info("socket"))
        if peer not in (0, os.geteuid()):
            log.warning("rejected at the control socket", extra=fields(uid=peer))
            transport.abort()  # type: ignore[attr-defined]
            return
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._control.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._control.disconnected(self)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._control.flush()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:  # rejected, or replaced by another
            return
        while (end := data.find(b"\n")) >= 0:
            line, data = b"".join((*self._input, data[:end])), data[end + 1 :]
            self._input, self._size = [], 0
            if not self._begins_well(line):
                return
            self._control.take(line)
        self._input.append(data)
        self._size += len(data)
        if self._size > _LINE_BYTES:
            log.warning("the agent's message is too long", extra=fields(bytes=self._size))
            self.close()

    def _begins_well(self, line: bytes) -> bool:
        """A peer that begins with anything but an object is not an agent, and nothing that it sends later is read.

        Code in Triton can lead Triton's socket here by a link: clients' requests would then arrive as messages.
        """
        self._is_known = self._is_known or line.startswith(b"{")
        if not self._is_known:
            log.warning("not an agent at the control socket", extra=fields(bytes=len(line)))
            self.close()
        return self._is_known

    def send(self, message: dict[str, object]) -> bool:
        if self._transport is None or not self._writable:
            return False
        self._transport.write(json.dumps(message).encode() + b"\n")
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _read(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidValue(f"{type(message).__name__} instead of an object")
    return message


def _drain(message: dict[str, Any]) -> tuple[str, float]:
    """Raises InvalidValue."""
    uid, seconds = message["drain"], message.get("seconds")
    if not isinstance(uid, str) or isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidValue("drain: a pod uid and seconds are expected")
    if not 0 <= seconds <= LONGEST_DRAIN_SECONDS:
        raise InvalidValue(f"drain: {seconds} s; 0 to {LONGEST_DRAIN_SECONDS:g} are expected")
    return uid, float(seconds)


def _peer_uid(sock: Any) -> int:
    """socket(7), SO_PEERCRED: struct ucred, pid, uid, gid."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def _listen(path: str) -> socket.socket:
    """A socket in place of one on which no process listens any more. Raises OSError."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # no process may connect before it has its mode
    try:
        listening.bind(path)
        os.chmod(path, _MODE)
        listening.listen(16)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _remove_stale(path: str) -> None:
    """Raises OSError where a process listens there, or where it is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(None, "it is there, and no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise FileExistsError(None, "another gateway listens there")
