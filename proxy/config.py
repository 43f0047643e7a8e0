"""The proxy's options, each default with its reason."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Address, Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import ModelName, parse_model_name
from berth.runtime import options as opt
from proxy.request.outstanding import MOST_OUTSTANDING


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
    # Endpoints are told of a pod's end in about this time; until then requests still come.
    drain_delay: float = opt.seconds("time to serve on after SIGTERM", default=5.0)
    # With the delay and the unload it fits a pod's default grace period of 30 s.
    drain_timeout: float = opt.seconds("the longest to wait for requests in flight", default=15.0)
    agent: Endpoint | None = opt.endpoint("the node's agent, which tells where the gateway is")
    token_file: Path | None = opt.option(
        "the pod's projected token of audience berth-agent", default=None, parse=Path, metavar="FILE"
    )
    # One process uses one core; a proxy that needs more than one serves a model that is hard to find.
    workers: int = opt.option(
        "processes that serve, with one limit and one report",
        default=1,
        parse=opt.integer(minimum=1, maximum=64),
        metavar="N",
    )
    # What one thread of Triton's REST front end loses answers beyond, less a margin (exchange/outstanding.py).
    triton_rest_requests: int = opt.option(
        "REST requests with Triton at once, all workers' together; beyond some 280 Triton loses answers of any model",
        default=MOST_OUTSTANDING,
        parse=opt.integer(minimum=64, maximum=10**6),
        metavar="N",
    )
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
    max_json_bytes: int = opt.option(
        "the largest JSON body or JSON header of a binary body, and what a packed one may unpack to",
        default=16 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="16Mi",
    )
    # What one client may put into a Triton that others share; larger tensors are cut into several requests.
    max_request_bytes: int = opt.option(
        "the largest request of any kind",
        default=64 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="64Mi",
    )
    # JSON costs Triton a multiple of its text, and is counted as such.
    max_inflight_bytes: int = opt.option(
        "what all requests that are under way may take of Triton's memory, and of the proxy's",
        default=256 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="256Mi",
    )

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
