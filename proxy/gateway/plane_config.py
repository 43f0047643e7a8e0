"""What a plane is made from: the form in which both `berth gateway` and a stand-alone `berth proxy` say it. Pure."""

from dataclasses import dataclass, replace

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.runtime.options import CommonOptions
from proxy.config import TlsFiles
from proxy.gateway.registry import Ceilings
from proxy.request.endpoint import UpstreamEndpoint
from proxy.wire.preamble import Kind


@dataclass(frozen=True, slots=True)
class Port:
    """`protocol` None: a connection begins with a handshake, which names the protocol and the replica."""

    listen: Endpoint
    flag: str
    protocol: Kind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """What keeps the replicas of a node apart. `memory_budget`: bodies of all replicas that are not yet with Triton."""

    ceilings: Ceilings
    memory_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneConfig:
    """`tenancy` None: there is one replica, which shares Triton and the plane with no other.

    Such a plane has no ceilings, no fair reads, no outlier detection, and keeps no REST request for another replica.
    """

    logs: CommonOptions
    triton: UpstreamEndpoint
    ports: tuple[Port, ...]
    workers: int
    triton_rest_requests: int
    tenancy: Tenancy | None
    tls: TlsFiles | None = None

    def worker_limits(self, limits: ReplicaLimits) -> ReplicaLimits:
        """What each worker's part of a replica may hold and have in Triton, so that all together keep to it."""
        part = limits.max_inflight_bytes // self.workers
        if self.tenancy is None:
            return replace(limits, max_inflight_bytes=part)
        return replace(self.tenancy.ceilings, max_inflight_bytes=part).capped(limits)

    def shares_limit(self, limits: ReplicaLimits) -> bool:
        """Whether the workers count a replica's requests together.

        Without a limit there is nothing to count; but the agent may set one while requests are under way.
        """
        return self.tenancy is not None or limits.container_concurrency > 0
