"""Every replica's load of the last second in one answer, as Knative's autoscaler knows it. Pure.

As JSON a list, with what Berth's own scaler goes by (`berth.contract.scaling`); as protobuf Knative's WireStatMessages
(serving, pkg/autoscaler/metrics/stat.proto): messages=1 of namespace=1, name=2 and stat=3.
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
    return msgspec.json.encode([_replica_load(replica, stats) for replica, stats in loads])


def _replica_load(replica: ReplicaSpec, stats: ReplicaStats) -> ReplicaLoad:
    load, figures = stats.load, stats.figures
    return ReplicaLoad(
        namespace=replica.namespace,
        pod_name=replica.pod,
        pod_uid=replica.pod_uid,
        model=replica.model,
        second=load.second,
        average_concurrent_requests=load.average_concurrency,
        request_count=load.requests,
        waiting=figures.waiting,
        in_triton=figures.running,
        container_concurrency=replica.limits.container_concurrency,
        last_arrival=int(load.last_arrival),
        process_uptime=load.uptime_seconds,
        timestamp=int(load.timestamp),
    )


def stats_protobuf(loads: Loads) -> bytes:
    return b"".join(
        protobuf.encode_bytes(
            1,
            protobuf.encode_bytes(1, replica.namespace.encode())
            + protobuf.encode_bytes(2, replica.model.encode())
            + protobuf.encode_bytes(3, encode_stat(stats.load, pod_name=replica.pod)),
        )
        for replica, stats in loads
    )
