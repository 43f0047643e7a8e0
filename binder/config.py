"""The binder's options."""

from dataclasses import dataclass

from berth.contract.endpoint import Endpoint
from berth.contract.keys import SCHEDULER_NAME
from berth.kube.options import KubeOptions
from berth.runtime import options as opt
from binder.engine.score import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class BinderOptions(KubeOptions):
    """`berth binder --help`."""

    scheduler_name: str = opt.option(
        "pods with this schedulerName are placed", default=SCHEDULER_NAME, metavar="NAME"
    )
    strategy: str = opt.option(
        "where a pod goes among the GPUs that fit: where least is lost for what others ask, the "
        "fullest, the emptiest, or any",
        default=STRATEGIES[0],
        parse=opt.choice(*STRATEGIES),
        metavar="|".join(STRATEGIES),
    )
    admin_listen: Endpoint = opt.endpoint("health and metrics", default="0.0.0.0:8480")
    extender_listen: Endpoint | None = opt.endpoint(
        "also answer kube-scheduler's extender calls (filter, prioritize, bind) here; unset: no extender"
    )
    extender_url: str | None = opt.option(
        "where other replicas send such calls while this one leads, e.g. http://POD_IP:8481",
        default=None,
        parse=opt.origin,
        metavar="URL",
    )
    schedulable_listen: Endpoint | None = opt.endpoint(
        "also answer the scaler, which replicas are schedulable, here; unset: no answers"
    )
    schedulable_url: str | None = opt.option(
        "where other replicas send the scaler while this one leads, e.g. http://POD_IP:8482",
        default=None,
        parse=opt.origin,
        metavar="URL",
    )
    leader_elect: bool = opt.switch("place pods only while holding the Lease berth-binder", default=True)
