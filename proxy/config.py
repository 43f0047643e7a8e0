"""The options of `berth proxy`, each default with its reason, and what those of the other data planes have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from berth.contract.endpoint import Address, Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import ModelName, parse_model_name
from berth.runtime import options as opt
from proxy.request.outstanding import MOST_OUTSTANDING


def quantity(help: str, *, mebibytes: int) -> Any:
    """A number of bytes."""
    return opt.option(
        help,
        default=mebibytes * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown=f"{mebibytes}Mi",
    )


def workers(help: str) -> Any:
    return opt.option(help, default=1, parse=opt.integer(minimum=1, maximum=64), metavar="N")


def triton_rest_requests(whose: str) -> Any:
    """What one thread of Triton's REST front end loses answers beyond, less a margin (`proxy.request.outstanding`)."""
    return opt.option(
        f"REST requests with Triton at once, {whose} together; beyond some 280 Triton loses answers of any model",
        default=MOST_OUTSTANDING,
        parse=opt.integer(minimum=64, maximum=10**6),
        metavar="N",
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`client_ca`: only clients with a certificate of this authority are served."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ProxyOptions(opt.CommonOptions):
    """`berth proxy --help`."""

    model: ModelName = opt.option("the one model that is served", parse=parse_model_name, metavar="NAME")
    triton_http: Endpoint | None = opt.endpoint("Triton's REST port")
    triton_grpc: Address | None = opt.address("Triton's gRPC port or socket")
    http_listen: Endpoint = opt.endpoint("REST clients", default="0.0.0.0:9000")
    grpc_listen: Endpoint = opt.endpoint("gRPC clients", default="0.0.0.0:9001")
    admin_listen: Endpoint = opt.endpoint("health, metrics and concurrency reports", default="0.0.0.0:9090")
    container_concurrency: int = opt.option(
        "requests inside Triton at once, REST and gRPC together; 0 is no limit",
        default=0,
        parse=opt.integer(maximum=10**6),
        metavar="N",
    )
    queue_depth: int | None = opt.option(
        "requests that may wait, for one that ends or for memory",
        default=None,
        parse=opt.integer(maximum=10**7),
        metavar="N",
        shown="10 x container-concurrency, 1000 where that is 0",
    )
    # Knative's revision timeout.
    request_timeout: float = opt.seconds(
        "the longest that a request may take, waiting included", default=300.0, minimum=0.1
    )
    # Endpoints follow a pod's end in about this time; until then requests still come.
    drain_delay: float = opt.seconds("time to serve on after SIGTERM", default=5.0)
    # With the delay and the unload it fits a pod's default grace period of 30 s.
    drain_timeout: float = opt.seconds("the longest to wait for requests in flight", default=15.0)
    agent: Endpoint | None = opt.endpoint("the node's agent, which tells where the gateway is")
    token_file: Path | None = opt.option(
        "the pod's projected token of audience berth-agent", default=None, parse=Path, metavar="FILE"
    )
    # One process uses one core; a proxy that needs more than one serves a model that is hard to find.
    workers: int = workers("processes that serve, with one limit and one report")
    triton_rest_requests: int = triton_rest_requests("all workers'")
    tls_cert: Path | None = opt.option(
        "serve TLS with this certificate chain; read again when it changes",
        default=None,
        parse=Path,
        metavar="FILE",
    )
    tls_key: Path | None = opt.option("its private key", default=None, parse=Path, metavar="FILE")
    tls_client_ca: Path | None = opt.option(
        "serve only clients with a certificate of this authority", default=None, parse=Path, metavar="FILE"
    )
    # Large enough for any JSON a person writes; tensors of this size belong into the binary extension.
    max_json_bytes: int = quantity(
        "the largest JSON body or JSON header of a binary body, and what a packed one may unpack to",
        mebibytes=16,
    )
    # What one client may put into a Triton that others share; larger tensors are cut into several requests.
    max_request_bytes: int = quantity("the largest request of any kind", mebibytes=64)
    # JSON costs Triton a multiple of its text, and is counted as such.
    max_inflight_bytes: int = quantity(
        "what all requests that are under way may take of Triton's memory, and of the proxy's", mebibytes=256
    )

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def limits(self) -> ReplicaLimits:
        """What the model's clients may take."""
        return ReplicaLimits(
            container_concurrency=self.container_concurrency,
            queue_depth=self.queue_depth,
            request_timeout_seconds=self.request_timeout,
            max_json_bytes=self.max_json_bytes,
            max_request_bytes=self.max_request_bytes,
            max_inflight_bytes=self.max_inflight_bytes,
        )
