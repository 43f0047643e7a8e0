"""The options of `berth gateway`."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Address, Endpoint, UnixSocket, parse_address
from berth.contract.errors import InvalidValue
from berth.runtime import options as opt
from proxy.gateway.registry import Ceilings
from proxy.request.outstanding import MOST_OUTSTANDING


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
    listen: Endpoint = opt.endpoint("the doors of the node's model pods", default="0.0.0.0:8472")
    control: UnixSocket = opt.option(
        "where the agent tells which models there are",
        default=UnixSocket("/run/berth/gateway/control"),
        parse=_socket,
        metavar="unix:PATH",
    )
    admin_listen: Endpoint = opt.endpoint("health, metrics and concurrency reports", default="0.0.0.0:8473")
    # One process uses one core, which is more than most nodes' models need.
    workers: int = opt.option(
        "processes that serve, with one limit and one report for each model",
        default=1,
        parse=opt.integer(minimum=1, maximum=64),
        metavar="N",
    )
    # What one thread of Triton's REST front end loses answers beyond, less a margin (exchange/outstanding.py).
    triton_rest_requests: int = opt.option(
        "REST requests with Triton at once, all models' and workers' together; beyond some 280 Triton loses answers of any model",
        default=MOST_OUTSTANDING,
        parse=opt.integer(minimum=64, maximum=10**6),
        metavar="N",
    )
    memory_budget: int = opt.option(
        "what requests that are here and not with Triton yet may take, all models' together",
        default=256 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="256Mi",
    )
    # The doors' own options of these names, without which nothing is asked for, have the same defaults.
    most_request_timeout: float = opt.seconds(
        "the longest request-timeout that a model gets, whatever its pod asks for",
        default=3600.0,
        minimum=0.1,
    )
    most_json_bytes: int = opt.option(
        "the largest max-json-bytes that a model gets",
        default=64 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="64Mi",
    )
    most_request_bytes: int = opt.option(
        "the largest max-request-bytes that a model gets",
        default=64 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="64Mi",
    )
    most_inflight_bytes: int = opt.option(
        "what one model's requests may take of Triton's memory, in each worker",
        default=256 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="256Mi",
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
