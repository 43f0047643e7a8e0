"""What Prometheus and a scaler read of all replicas."""

import json
from typing import Any

import pytest

from tests.fakes.agent_control import agent_at, replica_of
from tests.fakes.echo_gateway import echoed, get, known
from tests.fakes.sidecars import Refused


async def test_metrics_and_stats_of_all_replicas(start: Any) -> None:
    async with start() as here, agent_at(here.path) as agent:
        await known(here, agent, replica_of("a", "resnet"), replica_of("b", "resnet", namespace="two"))
        here.served("b").rest.answered("200", 0.1)
        with pytest.raises(Refused):
            await echoed(here, "c")
        status, text = await get(here, "/metrics")
        assert status == 200
        labels = ['namespace="two"', 'pod="pod-b"', 'model="resnet"']
        row = next(line for line in text.splitlines() if line.startswith("berth_proxy_requests_total"))
        assert all(label in row for label in labels)
        assert row.endswith(" 1.0")
        assert 'berth_gateway_rejected_connections_total{reason="unknown"} 1.0' in text
        assert "berth_gateway_replicas 2.0" in text
        assert "process_resident_memory_bytes" in text
        status, text = await get(here, "/stat")
        told = json.loads(text)
        assert [(one["podName"], one["podUid"]) for one in told] == [("pod-a", "a"), ("pod-b", "b")]
        loads = ("waiting", "inTriton", "containerConcurrency", "lastArrival")
        assert [[one[key] for key in loads] for one in told] == [[0, 0, 0, 0]] * 2
        status, text = await get(here, "/stat", Accept="application/protobuf")
        assert text.startswith("\n")
        assert "pod-a" in text
