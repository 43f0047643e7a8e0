"""Every copy's load of the last second in one answer, as Knative's autoscaler knows it. Pure.

As JSON a list, with what Berth's own scaler goes by (`berth.contract.scaling`); as protobuf Knative's WireStatMessages (serving, pkg/autoscaler/metrics/stat.proto): messages=1
of namespace=1, name=2 and stat=3.
"""

from collections.abc import Iterable

import msgspec

from berth.contract.gateway import ReplicaSpec
from berth.contract.scaling import ReplicaLoad
from proxy.gateway.spec import ReplicaStats
from proxy.request.load import encode_stat
from proxy.wire import protobuf

Loads = Iterable[tuple[ReplicaSpec, ReplicaStats]]


def stats_json(loads: Loads) -> bytes:
    return msgspec.json.encode([_copy_load(copy, stats) for copy, stats in loads])


def _copy_load(copy: ReplicaSpec, stats: ReplicaStats) -> ReplicaLoad:
    load, figures = stats.load, stats.figures
    return ReplicaLoad(
        namespace=copy.namespace,
        pod_name=copy.pod,
        pod_uid=copy.pod_uid,
        model=copy.model,
        second=load.second,
        average_concurrent_requests=load.average_concurrency,
        request_count=load.requests,
        waiting=figures.waiting,
        in_triton=figures.running,
        container_concurrency=copy.limits.container_concurrency,
        last_arrival=int(load.last_arrival),
        process_uptime=load.uptime_seconds,
        timestamp=int(load.timestamp),
    )


def stats_protobuf(loads: Loads) -> bytes:
    return b"".join(
        protobuf.encode_bytes(
            1,
            protobuf.encode_bytes(1, copy.namespace.encode())
            + protobuf.encode_bytes(2, copy.model.encode())
            + protobuf.encode_bytes(3, encode_stat(stats.load, pod_name=copy.pod)),
        )
        for copy, stats in loads
    )
