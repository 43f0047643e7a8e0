"""The scaler's options."""

from dataclasses import dataclass

from berth.runtime import options as opt
from berth.runtime.options import CommonOptions


@dataclass(frozen=True, kw_only=True)
class ScalerOptions(CommonOptions):
    """`berth scaler --help`."""

    replay: str = opt.option(
        "answer what these JSON lines ask, as Knative's decider would, and end; - for standard input",
        metavar="FILE",
    )
