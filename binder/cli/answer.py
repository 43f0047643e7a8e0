"""The answers of `berth why` and `berth would-fit`, as a table for people and JSON for programs.

Names, messages and annotations are written by others: what is shown is one line without control characters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from berth.contract.quantity import format_bytes
from berth.contract.wait_reason import WaitReason
from berth.kube.command import OutputOptions, console, plain
from binder.cli.progress import Progress
from binder.engine.cluster import Cluster
from binder.engine.decision import Placement
from binder.engine.explain import NodeVerdict, sentence, summary, verdicts
from binder.engine.remedy import remedy
from binder.pod.demand import Demand, Shape
from binder.rules.registry import RULES

_CLOSE_LOOKS = 32
_MESSAGE_LIMIT = 4000
_TO_AUTOSCALERS: Mapping[WaitReason, str] = {
    WaitReason.UNSCHEDULABLE: "one more node would take the pod, or no node is known yet",
    WaitReason.MODEL_TOO_LARGE: "no known kind of node is large enough, even when empty; they add none",
    WaitReason.NODES_REFUSE_MODEL: "every known kind of node refuses it; they add none",
    WaitReason.POD_REFUSED: "the pod itself is refused; they add no node",
    WaitReason.WAITING_FOR_CAPACITY: "other pods must go or come; they add no node",
    WaitReason.SCHEDULER_ERROR: "it has a place and could not be bound; they add no node",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One line that says it all, what would help, and the verdict on each node where there is one. `stage`: of a
    pod that exists; `reason`: what its condition tells cluster autoscalers."""

    message: str
    fits: bool = False
    remedy: str = ""
    verdicts: tuple[NodeVerdict, ...] = ()
    stage: str = ""
    reason: WaitReason | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **({"stage": self.stage} if self.stage else {}),
            "message": self.message,
            "fits": self.fits,
            **({} if self.reason is None else {"reason": self.reason.value}),
            "remedy": self.remedy,
            "nodes": [_node_json(verdict) for verdict in self.verdicts],
        }

    def show(self, console: Console) -> None:
        console.print(plain(self.message, limit=_MESSAGE_LIMIT))
        if self.remedy:
            console.print(plain(self.remedy, limit=_MESSAGE_LIMIT))
        if self.reason is not None:
            console.print(f"cluster autoscalers read {self.reason.value}: {_TO_AUTOSCALERS[self.reason]}")
        if not self.verdicts:
            return
        lines = Table("NODE", "GPU", "FREE", "WHY NOT", box=None, pad_edge=False)
        for verdict in self.verdicts:
            for row in _rows(verdict):
                lines.add_row(*(plain(part) for part in row))
        console.print(lines)


class Shown(Protocol):
    """What can be printed for people and for programs."""

    def to_json(self) -> dict[str, Any]: ...

    def show(self, console: Console) -> None: ...


@dataclass(frozen=True, slots=True)
class ProgressShown:
    """How far a pod is that has a node."""

    progress: Progress

    def to_json(self) -> dict[str, Any]:
        found = self.progress
        return {
            "stage": found.stage.value,
            "message": found.message,
            "since": found.since or None,
            "details": list(found.details),
            "times": dict(found.times),
        }

    def show(self, console: Console) -> None:
        console.print(plain(self.progress.message))
        for detail in self.progress.details:
            console.print(Text("  - "), plain(detail), sep="")
        if not self.progress.times:
            return
        lines = Table("PHASE", "AT", box=None, pad_edge=False)
        for phase, at in self.progress.times.items():
            lines.add_row(Text(phase), Text(at))
        console.print(lines)


def tell(answer: Shown, options: OutputOptions) -> None:
    """Print it as it is wanted."""
    if options.output == "json":
        print(json.dumps(answer.to_json(), indent=2))
    else:
        answer.show(console())


def judge(cluster: Cluster, demand: Demand, name: str) -> Answer:
    decider, asked = cluster.decider, _asked(demand.shape)
    outcome = decider.decide(demand)
    found = tuple(verdicts(decider, demand))
    if isinstance(outcome, Placement):
        fitting = sum(verdict.reason is None for verdict in found)
        message = f"{name} requests {asked} and fits on {fitting} of {len(found)} nodes"
        return Answer(f"{message}; the binder places it, if it runs", True, "", found)
    message = f"{name} requests {asked}; {summary(decider, demand, outcome)}"
    return Answer(message, False, remedy(decider, demand, outcome, most_nodes=_CLOSE_LOOKS), found)


def _asked(shape: Shape) -> str:
    each, count = shape.request_bytes, shape.gpu_count
    total = format_bytes(each * count)
    return total if count == 1 else f"{total} ({format_bytes(each)} on each of {count} GPUs)"


def _rows(verdict: NodeVerdict) -> list[tuple[str, str, str, str]]:
    """The node's own reason once, or each GPU's."""
    name = verdict.view.facts.name
    on_gpus = any(gpu.reason for gpu in verdict.gpus) or verdict.reason is None
    if (
        not verdict.gpus
        or not on_gpus
        or (verdict.reason and not RULES.named(verdict.reason.rule).is_of_gpus)
    ):
        return [(name, "-", "-", sentence(verdict.reason) if verdict.reason else "")]
    return [
        (
            name,
            f"{gpu.gpu.index} {gpu.gpu.product}",
            "?" if gpu.free_bytes is None else format_bytes(gpu.free_bytes),
            sentence(gpu.reason) if gpu.reason else "fits",
        )
        for gpu in verdict.gpus
    ]


def _node_json(verdict: NodeVerdict) -> dict[str, Any]:
    return {
        "node": verdict.view.facts.name,
        "reason": None if verdict.reason is None else verdict.reason.rule,
        "detail": "" if verdict.reason is None else verdict.reason.detail,
        "gpus": [
            {
                "uuid": gpu.gpu.uuid,
                "index": gpu.gpu.index,
                "freeBytes": gpu.free_bytes,
                "reason": None if gpu.reason is None else gpu.reason.rule,
                "shortBytes": None if gpu.reason is None else gpu.reason.short_bytes,
            }
            for gpu in verdict.gpus
        ],
    }
