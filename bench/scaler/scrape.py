"""What a scaler's process spends on asking the gateways of a cluster, and on making seconds of what they tell."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from berth.contract.endpoint import Endpoint
from berth.contract.keys import Keys
from berth.contract.scaling import ReplicaLoad
from scaler.core.cache import Cache
from scaler.core.scaler import Scaler
from scaler.decision.defaults import BERTH, read_defaults
from scaler.scrape import Gateway, Scraper, scraping_session

# Stands for the time of an answer; of as many digits.
_SECOND = 1_111_111_111
_CLASS = {"autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev"}


class _Counted:
    """Metrics of the scraper, as far as they are needed here."""

    def __init__(self) -> None:
        self.results: dict[str, int] = {}

    def scraped(self, result: str, seconds: float) -> None:
        self.results[result] = self.results.get(result, 0) + 1

    def rejected(self, rows: int) -> None:
        assert not rows


def core_share(nodes: int, replicas: int, seconds: float) -> tuple[float, Mapping[str, int]]:
    """Of a core, what scraping takes; how many questions were answered."""
    ours, theirs = multiprocessing.Pipe()
    gateways = multiprocessing.Process(target=_gateways, args=(theirs, nodes, replicas), daemon=True)
    gateways.start()
    try:
        ports = ours.recv()
        return asyncio.run(_scrape(ports, replicas, seconds))
    finally:
        gateways.terminate()
        gateways.join()


async def _scrape(ports: list[int], replicas: int, seconds: float) -> tuple[float, Mapping[str, int]]:
    cache = _cache(len(ports), replicas)
    core, counted = Scaler(cache, time.time_ns()), _Counted()
    asked = {
        f"node-{node}": Gateway(
            Endpoint("127.0.0.1", port), frozenset(_uid(node, replica) for replica in range(replicas))
        )
        for node, port in enumerate(ports)
    }

    def take(loads: list[ReplicaLoad], allowed: Container[str]) -> None:
        core.record_loads(loads, allowed, time.time_ns())

    async with scraping_session() as session:
        scraper = asyncio.create_task(Scraper(session, lambda: asked, take, counted).run())
        await asyncio.sleep(2.5)  # connections are made
        counted.results.clear()
        began, spent = time.monotonic(), time.process_time()
        while time.monotonic() < began + seconds:
            await asyncio.sleep(1.0)
            core.close_second(time.time_ns())
        share = (time.process_time() - spent) / (time.monotonic() - began)
        scraper.cancel()
        with suppress(asyncio.CancelledError):
            await scraper
    return share, counted.results


def _uid(node: int, replica: int) -> str:
    return f"{node:08x}-0000-4000-8000-{replica:012x}"


def _cache(nodes: int, replicas: int) -> Cache:
    cache = Cache(read_defaults(BERTH), Keys())
    models = max(nodes * replicas // 10, 1)
    for model in range(models):
        meta = {"name": f"m{model}", "namespace": "n", "uid": f"d{model}", "annotations": _CLASS}
        cache.observe_deployment({"metadata": meta, "spec": {"replicas": 10, "template": {"metadata": {}}}})
    for node in range(nodes):
        for replica in range(replicas):
            cache.observe_pod(_pod(node, replica, (node * replicas + replica) % models), time.time_ns())
    return cache


def _pod(node: int, replica: int, model: int) -> dict[str, object]:
    uid = _uid(node, replica)
    owner = {"kind": "ReplicaSet", "name": f"m{model}-5f", "controller": True}
    labels = {"pod-template-hash": "5f"}
    return {
        "metadata": {"name": uid, "namespace": "n", "uid": uid, "labels": labels, "ownerReferences": [owner]},
        "spec": {"nodeName": f"node-{node}"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _gateways(tell: Connection, nodes: int, replicas: int) -> None:
    asyncio.run(_serve(tell, nodes, replicas))


async def _serve(tell: Connection, nodes: int, replicas: int) -> None:
    """The smallest servers that answer as gateways do."""
    servers = [
        await asyncio.start_server(lambda r, w, node=node: _answer(r, w, node, replicas), "127.0.0.1", 0)  # type: ignore[misc]
        for node in range(nodes)
    ]
    tell.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.Event().wait()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: int, replicas: int
) -> None:
    """Its own time is not what is measured: only the seconds differ from one answer to the next."""
    body = json.dumps(_rows(node, replicas)).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    whole = head + body
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(whole.replace(str(_SECOND).encode(), str(int(time.time())).encode()))


def _rows(node: int, replicas: int) -> list[dict[str, object]]:
    return [
        {
            "namespace": "namespace",
            "podName": f"a-model-of-some-length-{replica:05}",
            "podUid": _uid(node, replica),
            "model": "a-model-of-some-length",
            "second": _SECOND,
            "averageConcurrentRequests": 1.2345678901234567,
            "requestCount": 12.000123456789,
            "waiting": 1,
            "inTriton": 2,
            "containerConcurrency": 4,
            "lastArrival": _SECOND,
            "processUptime": 12345.678901,
            "timestamp": _SECOND,
        }
        for replica in range(replicas)
    ]
