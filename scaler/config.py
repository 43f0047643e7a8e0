"""The scaler's options."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Endpoint
from berth.runtime import options as opt
from scaler.export.options import ExportOptions

# By which the scalers elect the one that leads; in their namespace.
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
        "the binders' Service, which says what may be placed",
        default="http://berth-binder.berth-system.svc:8482",
        parse=opt.origin,
        metavar="URL",
    )
    binder_token: Path = opt.option(
        "a token of audience berth-binder to ask it with; read again for each question",
        default=Path("/var/run/secrets/berth/binder/token"),
        parse=Path,
        metavar="FILE",
    )
    attend_listen: Endpoint = opt.endpoint(
        "activators; where the host is one that they reach, a replica that does not lead sends them here",
        default="0.0.0.0:9093",
    )
    admin_listen: Endpoint = opt.endpoint("health and metrics", default="0.0.0.0:8490")
    leader_elect: bool = opt.switch("scale only while holding the Lease berth-scaler", default=True)
    pod_uid: str = opt.option(
        "uid of the pod that this process runs in, as its only scaler: one that is started again in it takes over from the "
        "one before as soon as what that one wrote last is done, and does not wait for its Lease to run out",
        default="",
        metavar="UID",
    )
    record: Path | None = opt.option(
        "write down what each decision saw, as lines for --replay; what is there already becomes FILE.1",
        default=None,
        parse=Path,
        metavar="FILE",
    )
    replay: str | None = opt.option(
        "scale nothing: answer what these JSON lines ask, as Knative's decider would, and end; - for standard input",
        default=None,
        metavar="FILE",
    )
