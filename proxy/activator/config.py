"""The options of `berth activator`."""

from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.runtime import options as opt


def _ipv4(text: str) -> str:
    """Raises InvalidValue."""
    try:
        return str(IPv4Address(text))
    except ValueError:
        raise InvalidValue(f"{text!r} is not an address such as 10.0.0.7") from None


@dataclass(frozen=True, kw_only=True)
class ActivatorOptions(opt.CommonOptions):
    """`berth activator --help`."""

    scaler: Endpoint = opt.endpoint(
        "the scaler's Service; whichever replica answers names the one that leads", required=True
    )
    token_file: Path = opt.option(
        "the pod's projected token of audience berth-scaler; read again for each connection",
        parse=Path,
        metavar="FILE",
    )
    address: str = opt.option(
        "the pod's own IPv4 address: where the models' ports (20000 to 29999) are opened, and where Services lead to",
        parse=_ipv4,
        metavar="ADDRESS",
    )
    admin_listen: Endpoint = opt.endpoint("health and metrics", default="0.0.0.0:9090")
    # 10 000 requests of 1 KiB take about 200 MiB of the process; of that, this counts what is in their bodies.
    memory_budget: int = opt.option(
        "memory that buffered requests may take, of all models together",
        default=256 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="256Mi",
    )
    # As many as there are in a burst on many models, and as a process' descriptors usually allow.
    max_buffered_requests: int = opt.option(
        "requests buffered at once, of all models together; a model's own limit is the annotation hold-requests",
        default=65_536,
        parse=opt.integer(minimum=1, maximum=10**7),
        metavar="N",
    )
    max_connections: int = opt.option(
        "client connections, of all models together",
        default=65_536,
        parse=opt.integer(minimum=1, maximum=10**7),
        metavar="N",
    )
    # Its address leaves the slices in this time, and kube-proxies learn of it; until then requests still come.
    drain_delay: float = opt.seconds("time to serve on after SIGTERM", default=10.0)
    # No buffered request is lost when its activator ends: hold-timeout is 600 s at most, and then it is to be answered.
    drain_timeout: float = opt.seconds(
        "the longest to wait for requests that are buffered or under way; less than a model's hold-timeout cuts them off",
        default=630.0,
    )
