"""Where Triton is and what opens it, as all requests of a process see it. It may move while they wait."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from berth.contract.endpoint import Address, Endpoint
from proxy.policy.refusal import NotServed


@dataclass(frozen=True, slots=True)
class UpstreamEndpoint:
    """The headers are secret: never logged."""

    http: Endpoint
    grpc: Address
    http_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    grpc_metadata: Mapping[str, str] = field(default_factory=dict, repr=False)


class UpstreamCluster:
    """The access of now. Take it in the step in which it is used: who waited uses the new one."""

    def __init__(self, endpoint: UpstreamEndpoint | None = None) -> None:
        self.endpoint = endpoint
        self._followers: list[Callable[[UpstreamEndpoint], None]] = []

    def follow(self, moved: Callable[[UpstreamEndpoint], None]) -> None:
        """`moved` is called on every change; it must not raise."""
        self._followers.append(moved)

    def move(self, endpoint: UpstreamEndpoint) -> None:
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            for moved in self._followers:
                moved(endpoint)

    def require(self) -> UpstreamEndpoint:
        """Raises NotServed while Triton's endpoint is unknown."""
        if self.endpoint is None:
            raise NotServed("the agent has not reported yet where Triton is")
        return self.endpoint
