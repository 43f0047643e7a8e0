"""What `berth why` reads of a pod that has a node: also the heartbeats of agents of an earlier version."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from berth.kube.errors import response_error
from berth.kube.times import micro_time
from binder.cli import why
from tests.fakes.objects import KEYS, node, pod, report

LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/berth-agent-n1"
NEWER, EARLIER = LEASE.format("berth-system-nodes"), LEASE.format("berth-system")


class Server:
    """`leases`: minutes since each was renewed; None: it may not be read."""

    def __init__(self, leases: dict[str, int | None]) -> None:
        self.leases, self.host = leases, "https://server"

    async def get(self, path: str) -> dict[str, Any]:
        if path.endswith("/pods/p1"):
            return pod(on="n1")
        if path.endswith("/nodes/n1"):
            return node("n1", says=report())
        if path not in self.leases:
            raise response_error(404, "NotFound", path)
        if (minutes := self.leases[path]) is None:
            raise response_error(403, "Forbidden", path)
        renewed = datetime.now(UTC) - timedelta(minutes=minutes)
        return {"spec": {"renewTime": micro_time(renewed), "leaseDurationSeconds": 40}}


@pytest.mark.parametrize(
    ("leases", "beats"),
    [
        ({NEWER: 0}, True),
        ({EARLIER: 0}, True),
        ({NEWER: 0, EARLIER: 9}, True),
        ({NEWER: 9, EARLIER: 0}, True),
        ({NEWER: 0, EARLIER: None}, True),
        ({NEWER: 9, EARLIER: 9}, False),
        ({NEWER: 9, EARLIER: None}, False),
        ({}, False),
    ],
)
async def test_the_heartbeat_that_was_renewed_last_counts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    leases: dict[str, int | None],
    beats: bool,
) -> None:
    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Server]:
        yield Server(leases)

    monkeypatch.setattr(why, "open_client", opened)
    await why.main(why.WhyOptions(pod="p1", namespace="team", key_prefix=KEYS), asyncio.Event())
    assert ("heartbeat" not in capsys.readouterr().out) == beats
