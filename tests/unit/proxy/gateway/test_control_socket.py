"""The agent's connection to a whole gateway."""

import asyncio
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from berth.runtime.errors import CannotStart
from proxy.gateway import control_socket as control_module
from tests.fakes.agent_control import agent_at, replica_of
from tests.fakes.echo_gateway import echoed, known
from tests.fakes.eventually import until


async def test_lines_that_cannot_be_read_change_nothing(start: Any, caplog: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        bad = replica_of("b").to_json()
        for line in (
            b"nonsense",
            b"[]",
            b'{"replicas": 5}',
            b'{"replicas": [{}]}',
            b'{"drain": 5, "seconds": 1}',
            b'{"drain": "a", "seconds": -1}',
            b'{"drain": "a"}',
            b"[" * 100_000,
        ):
            agent.writer.write(line + b"\n")
        agent.say({"replicas": [replica_of("a").to_json(), {**bad, "ticket": "00"}]})
        agent.say({"replicas": [bad, {**bad, "podUid": "other", "serverName": "simple-other"}]})
        agent.say({"news": "unknown"})
        agent.drain("nobody", 1)
        assert await agent.hears() == {"drained": "nobody"}
        assert set(here.plane._by_uid) == {"a"}
        assert sum("cannot be read" in record.message for record in caplog.records) == 10
        assert await echoed(here, "a") == b"simple hello"


async def test_a_peer_that_does_not_begin_as_an_agent_is_not_read(start: Any) -> None:
    """HTTP/2 that was meant for Triton, with a client's bytes in it."""
    async with start() as here, agent_at(here.path) as stranger:
        stranger.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n")
        stranger.say({"replicas": [replica_of("a").to_json()]})
        with pytest.raises((EOFError, ConnectionError)):
            await stranger.hears()
        assert not here.gateway.control_plane.registry.is_listed


async def test_an_agent_that_restarts_gets_back_the_replica_that_it_drained(start: Any) -> None:
    async with start() as here:
        async with agent_at(here.path) as agent:
            await known(here, agent, replica_of("a"))
            agent.drain("a", 60)
            assert await agent.hears() == {"drained": "a"}
        async with agent_at(here.path) as agent:
            agent.tell([replica_of("a")])
            await until(lambda: not here.served("a").draining)
            assert await echoed(here, "a") == b"simple hello"


async def test_the_control_socket_is_for_the_agents_user(start: Any, monkeypatch: Any) -> None:
    async with start() as here:
        mode = stat.S_IMODE(os.stat(here.path).st_mode)
        assert mode in (0o600, 0o660)
        monkeypatch.setattr("proxy.gateway.control_socket._peer_uid", lambda _: os.geteuid() + 1)
        async with agent_at(here.path) as agent:
            with pytest.raises((EOFError, ConnectionError)):
                await agent.hears()
        assert not here.gateway.control_plane.registry.is_listed
    assert not os.path.exists(here.path)


async def cannot_start(start: Any, why: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with start():
            pass
    matched, rest = caught.value.split(CannotStart)
    assert rest is None
    assert matched is not None
    assert why in str(matched.exceptions[0])


async def test_the_socket_of_a_killed_gateway_is_replaced(start: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control"))
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        await cannot_start(start, "another gateway")
        assert await echoed(here, "a") == b"simple hello"
    (tmp_path / "control").write_text("no socket")
    await cannot_start(start, "no socket")


async def test_the_last_agent_to_connect_is_the_agent(start: Any) -> None:
    async with start() as here, agent_at(here.path) as old:
        await known(here, old, replica_of("a"))
        async with agent_at(here.path) as new:
            with pytest.raises((EOFError, ConnectionError)):
                await old.hears()
            await known(here, new, replica_of("b"))
            new.drain("b", 5)
            assert await new.hears() == {"drained": "b"}


async def test_a_line_that_never_ends_is_cut_off(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_LINE_BYTES", 1000)
    async with start() as here:
        reader, writer = await asyncio.open_unix_connection(here.path)
        writer.write(b"{" + b" " * 2000)
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                assert await reader.read(1) == b""
        writer.close()
