"""The options of `berth gateway`."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Address, Endpoint, UnixSocket, parse_address
from berth.contract.errors import InvalidValue
from berth.runtime import options as opt
from proxy.config import quantity, triton_rest_requests, workers
from proxy.gateway.registry import Ceilings


def _socket(text: str) -> UnixSocket:
    """Raises InvalidValue."""
    path = parse_address(text)
    if not isinstance(path, UnixSocket):
        raise InvalidValue(f"{text!r} is not unix:PATH")
    return path


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(opt.CommonOptions):
    """`berth gateway --help`."""

    triton_http: Endpoint = opt.endpoint("Triton's REST port", default="127.0.0.1:8000")
    triton_grpc: Address = opt.address("Triton's gRPC port or socket", default="127.0.0.1:8001")
    triton_keys: Path | None = opt.option(
        "Triton's inference key, or the directory where berth keys has put it; without it Triton is open",
        default=None,
        parse=Path,
        metavar="PATH",
    )
    listen: Endpoint = opt.endpoint("the proxies of the node's model pods", default="0.0.0.0:8472")
    control: UnixSocket = opt.option(
        "where the agent lists the replicas",
        default=UnixSocket("/run/berth/gateway/control"),
        parse=_socket,
        metavar="unix:PATH",
    )
    admin_listen: Endpoint = opt.endpoint("health, metrics and concurrency reports", default="0.0.0.0:8473")
    # One process uses one core, which is more than most nodes' models need.
    workers: int = workers("processes that serve, with one limit and one report for each replica")
    triton_rest_requests: int = triton_rest_requests("all models' and workers'")
    memory_budget: int = quantity(
        "memory for requests that are not with Triton yet, all models' together", mebibytes=256
    )
    # The options of `berth proxy` by these names, which apply to a pod that sets none, have the same defaults.
    most_request_timeout: float = opt.seconds(
        "the longest request-timeout that a model gets, whatever its pod requests",
        default=3600.0,
        minimum=0.1,
    )
    most_json_bytes: int = quantity("the largest max-json-bytes that a model gets", mebibytes=64)
    most_request_bytes: int = quantity("the largest max-request-bytes that a model gets", mebibytes=64)
    most_inflight_bytes: int = quantity(
        "what one model's requests may take of Triton's memory, in each worker", mebibytes=256
    )
    # With the time that Triton's own end takes it fits the grace period of its pod.
    drain_timeout: float = opt.seconds(
        "the longest to wait for requests in flight after SIGTERM", default=15.0
    )

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(
            request_timeout_seconds=self.most_request_timeout,
            max_json_bytes=self.most_json_bytes,
            max_request_bytes=self.most_request_bytes,
            max_inflight_bytes=self.most_inflight_bytes,
        )
