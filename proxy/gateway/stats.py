"""Every copy's load of the last second in one answer, as Knative's autoscaler knows it. Pure.

As JSON a list; as protobuf Knative's WireStatMessages (serving, pkg/autoscaler/metrics/stat.proto): messages=1
of namespace=1, name=2 and stat=3.
"""

from collections.abc import Iterable
from typing import Any

from berth.contract.gateway import Copy
from proxy.codecs import protobuf
from proxy.exchange.load import LoadReport, encode_stat

Loads = Iterable[tuple[Copy, LoadReport]]


def stats_json(loads: Loads) -> list[dict[str, Any]]:
    return [
        {
            "namespace": copy.namespace,
            "podName": copy.pod,
            "model": copy.model,
            "averageConcurrentRequests": load.average_concurrency,
            "requestCount": load.requests,
            "processUptime": load.uptime_seconds,
            "timestamp": int(load.timestamp),
        }
        for copy, load in loads
    ]


def stats_protobuf(loads: Loads) -> bytes:
    return b"".join(
        protobuf.encode_bytes(
            1,
            protobuf.encode_bytes(1, copy.namespace.encode())
            + protobuf.encode_bytes(2, copy.model.encode())
            + protobuf.encode_bytes(3, encode_stat(load, pod_name=copy.pod)),
        )
        for copy, load in loads
    )
