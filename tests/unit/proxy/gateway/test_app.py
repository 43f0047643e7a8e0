"""The whole gateway on real sockets, with a front that echoes in place of the protocols."""

import asyncio
from typing import Any

import pytest

from berth.contract.gateway import ReplicaLimits
from proxy.policy.refusal import Refusal
from proxy.request.lifecycle import Request
from proxy.wire.preamble import Kind
from tests.fakes.agent_control import agent_at, replica_of
from tests.fakes.echo_gateway import echoed, get, known
from tests.fakes.eventually import until
from tests.fakes.sidecars import Refused, connect


async def test_a_refusal_names_the_gateways_own_ceiling_where_that_is_what_bounds(start: Any) -> None:
    async with start(most_request_bytes=100) as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"), replica_of("b", limits=ReplicaLimits(max_request_bytes=99)))
        for uid, told in (
            ("a", "bounded by --most-request-bytes of the node's gateway"),
            ("b", r"\(--max-request-bytes\)"),
        ):
            replica = here.served(uid)
            with pytest.raises(Refusal, match=told):
                Request(replica, replica.rest, 0.0).require_size(101)


async def test_a_ticket_opens_its_own_replica_and_none_before_the_agent_has_listed_it(start: Any) -> None:
    async with start() as here:
        assert (await get(here, "/readyz"))[0] == 503
        assert (await get(here, "/livez"))[0] == 200
        with pytest.raises(Refused):
            await echoed(here, "a")
        async with agent_at(here.path) as agent:
            await known(here, agent, replica_of("a", "resnet"), replica_of("b", "resnet", namespace="two"))
            assert (await get(here, "/readyz"))[0] == 200
            for uid in "ab":
                assert await echoed(here, uid) == b"resnet hello"
            assert len(here.clients) == 2
            with pytest.raises(Refused):
                await echoed(here, "c")
        # The agent is away: what it told holds.
        assert await echoed(here, "a") == b"resnet hello"
        async with agent_at(here.path) as agent:
            await known(here, agent, replica_of("b", "resnet", namespace="two"))
            with pytest.raises(Refused):
                await echoed(here, "a")
            assert await echoed(here, "b") == b"resnet hello"


async def test_changed_limits_hold_at_once_and_close_no_connection(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a", limits=ReplicaLimits(container_concurrency=1)))
        replica = here.served("a")
        reader, writer = await connect(here.port, replica_of("a").ticket, Kind.REST)
        for _ in range(2):
            writer.write(b"work")
            await reader.read(100)
        assert (replica.admissions.running, replica.admissions.waiting) == (1, 1)
        agent.tell([replica_of("a", limits=ReplicaLimits(container_concurrency=2, max_request_bytes=10**15))])
        await until(lambda: replica.admissions.running == 2)
        assert here.served("a") is replica
        assert replica.limits.max_request_bytes == 64 * 1024**2  # the ceiling
        writer.write(b"still")
        assert await reader.read(100) == b"simple still"
        writer.close()


async def test_a_replica_that_is_no_longer_listed_is_drained_and_ended(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"), replica_of("b"))
        reader, writer = await connect(here.port, replica_of("a").ticket, Kind.REST)
        writer.write(b"work")
        await reader.read(100)
        (front,) = (front for front in here.clients.values() if front.clients)
        agent.tell([replica_of("b")])
        await until(lambda: front.stopped)
        here.plane.tick(asyncio.get_running_loop().time())
        writer.write(b"on")
        assert await reader.read(100) == b"simple on"  # what is under way goes on
        front.work[0].release(0.0)
        here.plane.tick(asyncio.get_running_loop().time())
        assert await reader.read() == b""
        writer.close()


async def test_the_agent_drains_a_replica(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"), replica_of("b"))
        reader, writer = await connect(here.port, replica_of("a").ticket, Kind.GRPC)
        writer.write(b"work")
        await reader.read(100)
        agent.drain("a", 60)
        await until(lambda: here.served("a").draining)
        with pytest.raises(Refused):
            await echoed(here, "a")
        assert await echoed(here, "b") == b"simple hello"
        front = next(front for front in here.clients.values() if front.work)
        await asyncio.sleep(0.2)
        front.work[0].release(0.0)
        assert await agent.hears() == {"drained": "a"}
        agent.drain("a", 60)
        assert await agent.hears() == {"drained": "a"}
        writer.close()


async def test_a_drain_has_an_end(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        reader, writer = await connect(here.port, replica_of("a").ticket, Kind.GRPC)
        writer.write(b"work")
        await reader.read(100)
        agent.drain("a", 0.2)
        assert await agent.hears() == {"drained": "a"}
        writer.close()


async def test_a_crash_names_the_replicas_that_were_in_triton(start: Any) -> None:
    async with start() as here:
        here.gateway._events.triton_crashed(frozenset())  # nobody knows yet which there are
        async with agent_at(here.path) as agent:
            assert await agent.hears() == {"tritonDied": {"suspects": []}}
            await known(here, agent, replica_of("a"), replica_of("b"))
            control_plane = here.gateway.control_plane
            for _ in range(2):
                control_plane._crashed_at = float("-inf")  # long ago
                here.gateway._events.triton_crashed(frozenset({"a"}))
                assert await agent.hears() == {"tritonDied": {"suspects": ["a"]}}
            assert "Triton has died" in (here.served("a").not_ready() or "")
            assert here.served("b").not_ready() is None
            _, text = await get(here, "/metrics")
            assert any(
                line.startswith("berth_gateway_triton_crashes_with_requests_total")
                and 'pod="pod-a"' in line
                and line.endswith(" 2.0")
                for line in text.splitlines()
            )


async def test_at_the_end_what_is_under_way_is_waited_for(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a"))
        reader, writer = await connect(here.port, replica_of("a").ticket, Kind.REST)
        writer.write(b"work")
        await reader.read(100)
        ending = asyncio.create_task(here.gateway.end(30))
        await until(lambda: here.served("a").draining)
        assert (await get(here, "/readyz"))[0] == 503
        with pytest.raises(Refused):
            await echoed(here, "a")
        assert not ending.done()
        next(iter(here.clients.values())).work[0].release(0.0)
        await ending
        writer.close()
