"""What a pod's proxy reads of its replica, and what it may say."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from proxy.gateway.spec import ReplicaStats, Spec
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures
from proxy.wire.preamble import Kind
from proxy.wire.report import LEAVING
from tests.fakes.agent_control import agent_at, replica_of
from tests.fakes.echo_gateway import echoed, known
from tests.fakes.eventually import until
from tests.fakes.gateway_plane import Plane, spec_of
from tests.fakes.sidecars import Refused, connect, reports


def lines(report: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report._transport.sent.splitlines()]


async def test_a_closed_connection_is_forgotten_and_of_too_many_the_oldest_is_closed(
    plane: Plane,
) -> None:
    await plane.apply(spec_of("a"))
    connections = [plane.connect("a", Kind.REPORT) for _ in range(9)]
    wires = [connection._transport for connection in connections]
    assert [wire.aborted for wire in wires] == [True] + [False] * 8
    for connection in connections:
        connection.connection_lost(None)
    before = [wire.sent for wire in wires]
    plane.data_plane.publish_stats({})
    assert [wire.sent for wire in wires] == before


async def test_each_change_is_reported_with_the_stats_of_all_processes(plane: Plane) -> None:
    await plane.apply(spec_of("a"))
    report = plane.connect("a", Kind.REPORT)
    figures = Figures(running=7)
    plane.data_plane.publish_stats({"a": ReplicaStats(figures, LoadReport(0.0, 0.0, 0.0, 0.0))})
    plane.replica("a").triton_says("gone")
    for _ in range(3):
        await asyncio.sleep(0)
    last = lines(report)[-1]
    assert last["notReady"] == "gone"
    assert last["figures"] == figures.to_json()


async def test_a_peer_that_does_not_read_has_no_more_waiting_and_learns_of_the_drain_later(
    plane: Plane,
) -> None:
    await plane.apply(spec_of("a"))
    report = plane.connect("a", Kind.REPORT)
    report.pause_writing()
    before = report._transport.sent
    await plane.apply(spec_of("a", draining=frozenset("a"), drained=frozenset("a")))
    plane.data_plane.publish_stats({})
    assert report._transport.sent == before
    report.resume_writing()
    plane.data_plane.publish_stats({})
    assert b'{"drained"' in report._transport.sent


# Over sockets.


async def test_a_replica_whose_pod_ends_is_unready_in_every_process_and_served_meanwhile(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        replica, told = here.served("a"), here.plane._by_uid["a"].spec
        here.plane.apply(
            Spec(replicas=(told,), leaving=frozenset({"a"}))
        )  # it has said so to another process
        assert replica.not_ready() == "draining"
        assert await echoed(here, "a") == b"simple hello"
        here.plane.apply(Spec(replicas=(told,)))
        assert replica.not_ready() is None
        async with reports(here.port, told.ticket) as sidecar:
            await sidecar.next()
            sidecar.writer.write(LEAVING)
            await until(lambda: here.plane.status().leaving == {"a"})
            assert replica.not_ready() == "draining"
            here.plane.apply(Spec(replicas=(told,)))  # from before this process had said so
            assert replica.not_ready() == "draining"
        await until(lambda: replica.not_ready() is None)
        assert here.plane.status().leaving == frozenset()


async def test_a_pods_proxy_reads_of_its_replica_alone_and_drains_it(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"), replica_of("b"))
        here.served("a").rest.answered("200", 0.1)
        async with reports(here.port, replica_of("a").ticket) as sidecar:
            first = await sidecar.next()
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
            agent.tell([replica_of("a", withheld="the GPU is broken"), replica_of("b")])
            assert (await sidecar.next())["notReady"] == "the GPU is broken"
            agent.tell([replica_of("a"), replica_of("b")])
            assert (await sidecar.next())["notReady"] is None
            sidecar.writer.write(b"nonsense\n")
            sidecar.ask_to_drain()
            said = [await sidecar.next() for _ in range(2)]
            while {"drained": True} not in said:
                said.append(await sidecar.next())
            assert said[0]["notReady"] == "draining"
            assert not here.served("b").draining
            assert (await sidecar.next())["notReady"] == "draining"  # every second


async def test_too_many_reports_of_one_pod_are_none_too_many_for_another(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"), replica_of("b"))
        ours = [await connect(here.port, replica_of("a").ticket, Kind.REPORT) for _ in range(20)]
        async with reports(here.port, replica_of("b").ticket) as sidecar:
            assert (await sidecar.next())["notReady"] is None
        last = ours[-1][0]
        assert b"notReady" in await last.readline()
        for reader, writer in ours[:12]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                while await reader.readexactly(1):
                    pass
            writer.close()
        for _, writer in ours:
            writer.close()


async def test_what_a_connection_has_said_ends_with_it_though_another_is_open(start: Any) -> None:
    """The container of a pod's sidecar is started anew: whoever is left has not said that it ends."""
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        async with reports(here.port, replica_of("a").ticket) as stays:
            for status in (b'{"drain":true}\n', b'{"leaving":true}\n'):
                async with reports(here.port, replica_of("a").ticket) as goes:
                    goes.writer.write(status)
                    while (await stays.next()).get("notReady") != "draining":
                        pass
                async with asyncio.timeout(5):
                    while (await stays.next()).get("notReady", "draining") is not None:
                        pass
                assert await echoed(here, "a")


async def test_a_flood_of_connections_gets_few_lines(start: Any) -> None:
    """Each costs a line at once: what a pod's connections cost all the others is bounded in every second."""
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"), replica_of("b"))
        taken, began = 0, asyncio.get_running_loop().time()
        for _ in range(400):
            try:
                reader, writer = await connect(here.port, replica_of("a").ticket, Kind.REPORT)
            except Refused:
                continue
            taken += 1
            assert b"notReady" in await reader.readline()
            writer.close()
        seconds = asyncio.get_running_loop().time() - began
        assert 32 <= taken <= 32 * (seconds + 2)
        async with reports(here.port, replica_of("b").ticket) as sidecar:
            assert (await sidecar.next())["notReady"] is None
        here.plane.tick(0.0)
        (await connect(here.port, replica_of("a").ticket, Kind.REPORT))[1].close()


async def test_a_peer_that_sends_without_end_is_closed(start: Any) -> None:
    """What it says is nobody's turn: it has to be short, or all others wait for it."""
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        reader, writer = await connect(here.port, replica_of("a").ticket, Kind.REPORT)
        writer.write(b'{"nothing":1}\n' * 5000 + b'{"drain":true}\n')
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await reader.read(65536):
                    pass
        assert not here.served("a").draining
        writer.close()
        # Now and then a status is no flood, however long it goes on.
        async with reports(here.port, replica_of("a").ticket) as sidecar:
            for _ in range(6):
                sidecar.writer.write(b'{"nothing":1}\n' * 200)
                await asyncio.sleep(0.05)
                here.plane.publish_stats({})
            sidecar.ask_to_drain()
            await until(lambda: here.served("a").draining)
