"""The whole gateway on real sockets, with a front that echoes in place of the protocols."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from berth.contract.endpoint import Endpoint, UnixSocket
from berth.contract.gateway import ReplicaLimits
from berth.runtime.errors import CannotStart
from proxy.gateway import control_socket as control_module
from proxy.gateway import serving as plane_module
from proxy.gateway.app import Gateway, serving
from proxy.gateway.config import GatewayOptions
from proxy.gateway.data_plane import DataPlane
from proxy.gateway.spec import Spec
from proxy.policy.refusal import Refusal
from proxy.request.lifecycle import Request
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind
from proxy.wire.report import LEAVING
from tests.fakes.agent_control import Agent, agent_at, copy_of
from tests.fakes.eventually import until
from tests.fakes.sidecars import Refused, connect, reports

ANYWHERE = Endpoint("127.0.0.1", 0)


class Echo(asyncio.Protocol):
    """Says back what it hears, with its copy's public name; `work` is a request that Triton has until told."""

    def __init__(self, front: "EchoFront") -> None:
        self._front = front
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._front.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.clients.discard(self)

    def data_received(self, data: bytes) -> None:
        copy = self._front.copy
        if data == b"work":
            self._front.work.append(copy.admissions.admit(0.0, lambda: None))
        self.transport.write(copy.names.public + b" " + data)


class EchoFront:
    def __init__(self, copy: Replica) -> None:
        self.copy = copy
        self.clients: set[Echo] = set()
        self.work: list[Any] = []
        self.told = 0
        self.stopped = False

    def connection(self) -> asyncio.Protocol:
        return Echo(self)

    @property
    def busy_connections(self) -> int:
        return 0

    def tick(self, now: float) -> None: ...

    def readiness_changed(self) -> None:
        self.told += 1

    def stop_accepting(self) -> None:
        self.stopped = True

    def close(self) -> None:
        for client in list(self.clients):
            client.transport.abort()


class Here:
    """A running gateway."""

    def __init__(self, gateway: Gateway, node: DataPlane, port: int, path: str) -> None:
        self.gateway, self.node, self.port, self.path = gateway, node, port, path
        self.fronts: dict[bytes, EchoFront] = {}

    def served(self, uid: str) -> Replica:
        return self.node._by_uid[uid].copy


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: dict[bytes, EchoFront] = {}
    parts: list[Any] = []

    def make_front(self: Any, kind: Kind, copy: Replica, _: Any) -> EchoFront:
        return made.setdefault(copy.names.server, EchoFront(copy))

    class Seen(plane_module._Parts):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            parts.append(self)

        _make_front = make_front  # type: ignore[assignment]

    class Ready:
        def __init__(self, copy: Replica, *_: Any) -> None:
            self._copy = copy

        async def poll(self) -> None:
            self._copy.triton_says(None)
            await asyncio.Event().wait()

    monkeypatch.setattr(plane_module, "_Parts", Seen)
    monkeypatch.setattr(plane_module, "Upstream", Ready)

    @asynccontextmanager
    async def run(**more: Any) -> AsyncIterator[Here]:
        wanted: dict[str, Any] = {
            "control": UnixSocket(str(tmp_path / "control")),
            "listen": ANYWHERE,
            "admin_listen": ANYWHERE,
            **more,
        }
        async with serving(GatewayOptions(**wanted)) as gateway:
            here = Here(gateway, parts[-1].node, parts[-1].listener.port, str(tmp_path / "control"))
            here.fronts = made
            yield here

    return run


async def get(here: Here, path: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{here.gateway.admin.port}{path}"
        async with session.get(url, headers=headers) as answer:
            return answer.status, (await answer.read()).decode("latin-1")


async def echoed(here: Here, uid: str, *, kind: Kind = Kind.REST) -> bytes:
    reader, writer = await connect(here.port, copy_of(uid).ticket, kind)
    writer.write(b"hello")
    async with asyncio.timeout(5):
        answer = await reader.read(100)
    writer.close()
    return answer


async def known(here: Here, agent: Agent, *copies: Any) -> None:
    agent.tell(copies)
    wanted = {copy.pod_uid for copy in copies}
    await until(lambda: set(here.node._by_uid) == wanted and here.gateway.control_plane.registry.is_told)


async def test_a_door_that_will_leave_is_heard_in_every_process_and_served_meanwhile(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        copy, told = here.served("a"), here.node._by_uid["a"].told
        here.node.apply(Spec(copies=(told,), leaving=frozenset({"a"})))  # it has said so to another process
        assert copy.not_ready() == "draining"
        assert await echoed(here, "a") == b"simple hello"
        here.node.apply(Spec(copies=(told,)))
        assert copy.not_ready() is None
        async with reports(here.port, told.ticket) as door:
            await door.next()
            door.writer.write(LEAVING)
            await until(lambda: here.node.status().leaving == {"a"})
            assert copy.not_ready() == "draining"
            here.node.apply(Spec(copies=(told,)))  # from before this process had said so
            assert copy.not_ready() == "draining"
        await until(lambda: copy.not_ready() is None)
        assert here.node.status().leaving == frozenset()


async def test_a_refusal_names_the_gateways_own_ceiling_where_that_is_what_bounds(start: Any) -> None:
    async with start(most_request_bytes=100) as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"), copy_of("b", limits=ReplicaLimits(max_request_bytes=99)))
        for uid, told in (
            ("a", "bounded by --most-request-bytes of the node's gateway"),
            ("b", r"\(--max-request-bytes\)"),
        ):
            copy = here.served(uid)
            with pytest.raises(Refusal, match=told):
                Request(copy, copy.rest, 0.0).require_size(101)


async def test_a_ticket_opens_its_own_model_and_nothing_before_the_agent_has_told(start: Any) -> None:
    async with start() as here:
        assert (await get(here, "/readyz"))[0] == 503
        assert (await get(here, "/livez"))[0] == 200
        with pytest.raises(Refused):
            await echoed(here, "a")
        async with agent_at(here.path) as agent:
            await known(here, agent, copy_of("a", "resnet"), copy_of("b", "resnet", namespace="two"))
            assert (await get(here, "/readyz"))[0] == 200
            for uid in "ab":
                assert await echoed(here, uid) == b"resnet hello"
            assert len(here.fronts) == 2
            with pytest.raises(Refused):
                await echoed(here, "c")
        # The agent is away: what it told holds.
        assert await echoed(here, "a") == b"resnet hello"
        async with agent_at(here.path) as agent:
            await known(here, agent, copy_of("b", "resnet", namespace="two"))
            with pytest.raises(Refused):
                await echoed(here, "a")
            assert await echoed(here, "b") == b"resnet hello"


async def test_lines_that_cannot_be_read_change_nothing(start: Any, caplog: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        bad = copy_of("b").to_json()
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
        agent.say({"replicas": [copy_of("a").to_json(), {**bad, "ticket": "00"}]})
        agent.say({"replicas": [bad, {**bad, "podUid": "other", "serverName": "simple-other"}]})
        agent.say({"news": "unknown"})
        agent.drain("nobody", 1)
        assert await agent.hears() == {"drained": "nobody"}
        assert set(here.node._by_uid) == {"a"}
        assert sum("not readable" in record.message for record in caplog.records) == 10
        assert await echoed(here, "a") == b"simple hello"


async def test_who_begins_as_no_agent_does_is_not_heard(start: Any) -> None:
    """HTTP/2 that was meant for Triton, with a client's bytes in it."""
    async with start() as here, agent_at(here.path) as stranger:
        stranger.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n")
        stranger.say({"replicas": [copy_of("a").to_json()]})
        with pytest.raises((EOFError, ConnectionError)):
            await stranger.hears()
        assert not here.gateway.control_plane.registry.is_told


async def test_changed_limits_hold_at_once_and_nobody_loses_a_connection(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a", limits=ReplicaLimits(container_concurrency=1)))
        copy = here.served("a")
        reader, writer = await connect(here.port, copy_of("a").ticket, Kind.REST)
        for _ in range(2):
            writer.write(b"work")
            await reader.read(100)
        assert (copy.admissions.running, copy.admissions.waiting) == (1, 1)
        agent.tell([copy_of("a", limits=ReplicaLimits(container_concurrency=2, max_request_bytes=10**15))])
        await until(lambda: copy.admissions.running == 2)
        assert here.served("a") is copy
        assert copy.limits.max_request_bytes == 64 * 1024**2  # the ceiling
        writer.write(b"still")
        assert await reader.read(100) == b"simple still"
        writer.close()


async def test_a_copy_that_is_gone_is_drained_and_ended(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"), copy_of("b"))
        reader, writer = await connect(here.port, copy_of("a").ticket, Kind.REST)
        writer.write(b"work")
        await reader.read(100)
        (front,) = (front for front in here.fronts.values() if front.clients)
        agent.tell([copy_of("b")])
        await until(lambda: front.stopped)
        here.node.tick(asyncio.get_running_loop().time())
        writer.write(b"on")
        assert await reader.read(100) == b"simple on"  # what is under way goes on
        front.work[0].release(0.0)
        here.node.tick(asyncio.get_running_loop().time())
        assert await reader.read() == b""
        writer.close()


async def test_the_agent_drains_a_copy(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"), copy_of("b"))
        reader, writer = await connect(here.port, copy_of("a").ticket, Kind.GRPC)
        writer.write(b"work")
        await reader.read(100)
        agent.drain("a", 60)
        await until(lambda: here.served("a").draining)
        with pytest.raises(Refused):
            await echoed(here, "a")
        assert await echoed(here, "b") == b"simple hello"
        front = next(front for front in here.fronts.values() if front.work)
        await asyncio.sleep(0.2)
        front.work[0].release(0.0)
        assert await agent.hears() == {"drained": "a"}
        agent.drain("a", 60)
        assert await agent.hears() == {"drained": "a"}
        writer.close()


async def test_an_agent_that_restarts_and_wants_the_copy_it_drained_gets_it_back(start: Any) -> None:
    async with start() as here:
        async with agent_at(here.path) as agent:
            await known(here, agent, copy_of("a"))
            agent.drain("a", 60)
            assert await agent.hears() == {"drained": "a"}
        async with agent_at(here.path) as agent:
            agent.tell([copy_of("a")])
            await until(lambda: not here.served("a").draining)
            assert await echoed(here, "a") == b"simple hello"


async def test_a_drain_has_an_end(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        reader, writer = await connect(here.port, copy_of("a").ticket, Kind.GRPC)
        writer.write(b"work")
        await reader.read(100)
        agent.drain("a", 0.2)
        assert await agent.hears() == {"drained": "a"}
        writer.close()


async def test_a_door_hears_of_its_copy_alone_and_drains_it(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"), copy_of("b"))
        here.served("a").rest.answered("200", 0.1)
        async with reports(here.port, copy_of("a").ticket) as door:
            first = await door.next()
            assert first["notReady"] is None
            assert first["figures"]["rest"]["codes"] == {"200": 1}
            assert set(first["load"]) == {
                "average_concurrency",
                "requests",
                "uptime_seconds",
                "timestamp",
                "second",
                "last_arrival",
            }
            agent.tell([copy_of("a", withheld="the GPU is broken"), copy_of("b")])
            assert (await door.next())["notReady"] == "the GPU is broken"
            agent.tell([copy_of("a"), copy_of("b")])
            assert (await door.next())["notReady"] is None
            door.writer.write(b"nonsense\n")
            door.ask_to_drain()
            said = [await door.next() for _ in range(2)]
            while {"drained": True} not in said:
                said.append(await door.next())
            assert said[0]["notReady"] == "draining"
            assert not here.served("b").draining
            assert (await door.next())["notReady"] == "draining"  # every second


async def test_too_many_reports_of_one_pod_are_none_too_many_for_another(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"), copy_of("b"))
        ours = [await connect(here.port, copy_of("a").ticket, Kind.REPORT) for _ in range(20)]
        async with reports(here.port, copy_of("b").ticket) as door:
            assert (await door.next())["notReady"] is None
        last = ours[-1][0]
        assert b"notReady" in await last.readline()
        for reader, writer in ours[:12]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                while await reader.readexactly(1):
                    pass
            writer.close()
        for _, writer in ours:
            writer.close()


async def test_what_a_door_has_said_goes_with_it_though_another_is_there(start: Any) -> None:
    """The container of a pod's door is started anew: whoever is left has not said that it ends."""
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        async with reports(here.port, copy_of("a").ticket) as stays:
            for status in (b'{"drain":true}\n', b'{"leaving":true}\n'):
                async with reports(here.port, copy_of("a").ticket) as goes:
                    goes.writer.write(status)
                    while (await stays.next()).get("notReady") != "draining":
                        pass
                async with asyncio.timeout(5):
                    while (await stays.next()).get("notReady", "draining") is not None:
                        pass
                assert await echoed(here, "a")


async def test_a_flood_of_reports_is_told_little(start: Any) -> None:
    """Each costs a line at once: what a pod's connections cost all the others is bounded in every second."""
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"), copy_of("b"))
        taken, began = 0, asyncio.get_running_loop().time()
        for _ in range(400):
            try:
                reader, writer = await connect(here.port, copy_of("a").ticket, Kind.REPORT)
            except Refused:
                continue
            taken += 1
            assert b"notReady" in await reader.readline()
            writer.close()
        seconds = asyncio.get_running_loop().time() - began
        assert 32 <= taken <= 32 * (seconds + 2)
        async with reports(here.port, copy_of("b").ticket) as door:
            assert (await door.next())["notReady"] is None
        here.node.tick(0.0)
        (await connect(here.port, copy_of("a").ticket, Kind.REPORT))[1].close()


async def test_a_door_that_talks_without_end_is_not_listened_to(start: Any) -> None:
    """What it says is nobody's turn: it has to be short, or all others wait for it."""
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        reader, writer = await connect(here.port, copy_of("a").ticket, Kind.REPORT)
        writer.write(b'{"nothing":1}\n' * 5000 + b'{"drain":true}\n')
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await reader.read(65536):
                    pass
        assert not here.served("a").draining
        writer.close()
        # Now and then a status is no flood, however long it goes on.
        async with reports(here.port, copy_of("a").ticket) as door:
            for _ in range(6):
                door.writer.write(b'{"nothing":1}\n' * 200)
                await asyncio.sleep(0.05)
                here.node.publish_stats({})
            door.ask_to_drain()
            await until(lambda: here.served("a").draining)


async def test_metrics_and_stat_of_all_copies(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a", "resnet"), copy_of("b", "resnet", namespace="two"))
        here.served("b").rest.answered("200", 0.1)
        with pytest.raises(Refused):
            await echoed(here, "c")
        status, text = await get(here, "/metrics")
        assert status == 200
        labels = ['namespace="two"', 'pod="pod-b"', 'model="resnet"']
        row = next(line for line in text.splitlines() if line.startswith("berth_proxy_requests_total"))
        assert all(label in row for label in labels)
        assert row.endswith(" 1.0")
        assert 'berth_gateway_turned_away_total{reason="unknown"} 1.0' in text
        assert "berth_gateway_copies 2.0" in text
        assert "process_resident_memory_bytes" in text
        status, text = await get(here, "/stat")
        told = json.loads(text)
        assert [(one["podName"], one["podUid"]) for one in told] == [("pod-a", "a"), ("pod-b", "b")]
        loads = ("waiting", "inTriton", "containerConcurrency", "lastArrival")
        assert [[one[key] for key in loads] for one in told] == [[0, 0, 0, 0]] * 2
        status, text = await get(here, "/stat", Accept="application/protobuf")
        assert text.startswith("\n")
        assert "pod-a" in text


async def test_who_was_in_triton_when_it_died(start: Any) -> None:
    async with start() as here:
        here.gateway._triton_died(frozenset())  # nobody knows yet which there are
        async with agent_at(here.path) as agent:
            assert await agent.hears() == {"tritonDied": {"suspects": []}}
            await known(here, agent, copy_of("a"), copy_of("b"))
            control_plane = here.gateway.control_plane
            for _ in range(2):
                control_plane._died_at = float("-inf")  # long ago
                here.gateway._triton_died(frozenset({"a"}))
                assert await agent.hears() == {"tritonDied": {"suspects": ["a"]}}
            assert "Triton has died" in (here.served("a").not_ready() or "")
            assert here.served("b").not_ready() is None
            _, text = await get(here, "/metrics")
            assert any(
                line.startswith("berth_gateway_triton_deaths_with_requests_total")
                and 'pod="pod-a"' in line
                and line.endswith(" 2.0")
                for line in text.splitlines()
            )


async def test_the_control_socket_is_for_the_agents_user(start: Any, monkeypatch: Any) -> None:
    async with start() as here:
        mode = stat.S_IMODE(os.stat(here.path).st_mode)
        assert mode in (0o600, 0o660)
        monkeypatch.setattr("proxy.gateway.control_socket._peer_uid", lambda _: os.geteuid() + 1)
        async with agent_at(here.path) as agent:
            with pytest.raises((EOFError, ConnectionError)):
                await agent.hears()
        assert not here.gateway.control_plane.registry.is_told
    assert not os.path.exists(here.path)


async def test_a_socket_that_a_killed_gateway_left_is_no_hindrance(start: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control"))
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        await cannot_start(start, "another gateway")
        assert await echoed(here, "a") == b"simple hello"
    (tmp_path / "control").write_text("no socket")
    await cannot_start(start, "no socket")


async def cannot_start(start: Any, why: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with start():
            pass
    matched, rest = caught.value.split(CannotStart)
    assert rest is None
    assert matched is not None
    assert why in str(matched.exceptions[0])


async def test_the_last_agent_that_comes_is_the_agent(start: Any) -> None:
    async with start() as here, agent_at(here.path) as old:
        await known(here, old, copy_of("a"))
        async with agent_at(here.path) as new:
            with pytest.raises((EOFError, ConnectionError)):
                await old.hears()
            await known(here, new, copy_of("b"))
            new.drain("b", 5)
            assert await new.hears() == {"drained": "b"}


async def test_at_the_end_what_is_under_way_is_waited_for(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, copy_of("a"))
        reader, writer = await connect(here.port, copy_of("a").ticket, Kind.REST)
        writer.write(b"work")
        await reader.read(100)
        ending = asyncio.create_task(here.gateway.end(30))
        await until(lambda: here.served("a").draining)
        assert (await get(here, "/readyz"))[0] == 503
        with pytest.raises(Refused):
            await echoed(here, "a")
        assert not ending.done()
        next(iter(here.fronts.values())).work[0].release(0.0)
        await ending
        writer.close()


async def test_a_word_that_never_ends_is_not_waited_for(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_LINE_BYTES", 1000)
    async with start() as here:
        reader, writer = await asyncio.open_unix_connection(here.path)
        writer.write(b"{" + b" " * 2000)
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                assert await reader.read(1) == b""
        writer.close()
