"""The scaler's options."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Endpoint
from berth.runtime import options as opt
from scaler.export.options import ExportOptions

# The scalers elect their leader by it, in their namespace.
LEASE = "berth-scaler"


@dataclass(frozen=True, kw_only=True)
class ScalerOptions(ExportOptions):
    """`berth scaler --help`."""

    config: Path | None = opt.option(
        "directory with the keys of Knative's ConfigMap config-autoscaler, a file each, as one is mounted: what "
        "holds for models that do not say otherwise",
        default=None,
        parse=Path,
        metavar="DIR",
    )
    binder: str = opt.option(
        "URL of the binders' Service, which says how many replicas can be scheduled",
        default="http://berth-binder.berth-system.svc:8482",
        parse=opt.origin,
        metavar="URL",
    )
    binder_token: Path = opt.option(
        "file with a token of audience berth-binder, for requests to the binder; read again for each request",
        default=Path("/var/run/secrets/berth/binder/token"),
        parse=Path,
        metavar="FILE",
    )
    control_listen: Endpoint = opt.endpoint(
        "listen address for activators; if they can reach its host, a standby redirects them to the leader's",
        default="0.0.0.0:9093",
    )
    admin_listen: Endpoint = opt.endpoint("health and metrics", default="0.0.0.0:8490")
    leader_elect: bool = opt.switch("scale only while holding the Lease berth-scaler", default=True)
    pod_uid: str = opt.option(
        "uid of this process's pod, in which it is the only scaler: after a restart of the container it takes over from its "
        "predecessor once the last write of that one is done, and does not wait until the Lease expires",
        default="",
        metavar="UID",
    )
    record: Path | None = opt.option(
        "record the input of each decision, as lines for --replay; an existing FILE is renamed to FILE.1",
        default=None,
        parse=Path,
        metavar="FILE",
    )
    replay: str | None = opt.option(
        "do not scale: answer these JSON lines as Knative's decider would, and exit; - reads standard input",
        default=None,
        metavar="FILE",
    )
