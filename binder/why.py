"""`berth why POD`: why a pod is pending, node by node and GPU by GPU."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from berth.contract.errors import InvalidPod
from berth.contract.keys import SCHEDULER_NAME, Keys
from berth.contract.pod import node_of
from berth.contract.quantity import format_bytes
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.errors import KubeError, NotFound
from berth.runtime import options as opt
from berth.runtime.errors import EXIT_CRASH, CannotStart
from berth.runtime.process import run_process
from binder.demand import Demand, parse_demand
from binder.explain import sentence, summary
from binder.filters import NodeVerdict, judge
from binder.snapshot import read_cluster
from binder.top import OutputOptions

SUMMARY = "Say why a pod is pending, node by node and GPU by GPU."


@dataclass(frozen=True, kw_only=True)
class WhyOptions(OutputOptions):
    """Which pod."""

    pod: str = opt.positional("the pod", metavar="POD")
    namespace: str = opt.option("the pod's namespace", default="default", metavar="NAME", short="-n")
    scheduler_name: str = opt.option("the binder's schedulerName", default=SCHEDULER_NAME, metavar="NAME")


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth why`."""
    return run_process("why", SUMMARY, WhyOptions, main, argv)


async def main(options: WhyOptions, _: asyncio.Event) -> None:
    async with open_client(options.kubeconfig) as client:
        try:
            pod = await client.get(paths.pod(options.namespace, options.pod))
            answer = await _explain(client, pod, options)
        except NotFound as error:
            print(f"berth why: pod {options.namespace}/{options.pod} does not exist", file=sys.stderr)
            raise SystemExit(EXIT_CRASH) from error
        except KubeError as error:
            raise CannotStart(f"API server {client.host}: {error}") from error
    if options.output == "json":
        print(json.dumps(answer.to_json(), indent=2))
    else:
        answer.show(Console(soft_wrap=True))


@dataclass(frozen=True, slots=True)
class Answer:
    """One line that says it all, and the verdict on each node where there is one."""

    message: str
    verdicts: tuple[NodeVerdict, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"message": self.message, "nodes": [_node_json(verdict) for verdict in self.verdicts]}

    def show(self, console: Console) -> None:
        console.print(Text(self.message))
        if not self.verdicts:
            return
        lines = Table("NODE", "GPU", "FREE", "WHY NOT", box=None, pad_edge=False)
        for verdict in self.verdicts:
            for row in _rows(verdict):
                lines.add_row(*(Text(part) for part in row))
        console.print(lines)


async def _explain(client: KubeClient, pod: dict[str, Any], options: WhyOptions) -> Answer:
    name = f"{options.namespace}/{options.pod}"
    if node := node_of(pod):
        return Answer(f"{name} is not pending: it is on node {node}")
    actual = pod["spec"].get("schedulerName")
    if actual != options.scheduler_name:
        return Answer(
            f"{name} is not the binder's: its schedulerName is {actual}, not {options.scheduler_name}"
        )
    try:
        demand = parse_demand(pod, options.key_prefix)
    except InvalidPod as error:
        return Answer(f"{name} cannot be placed: {error}")
    if demand.gated:
        return Answer(f"{name} is held back by its schedulingGates")
    verdicts = await _judge(client, demand, options.key_prefix, options.system_namespace)
    asked = format_bytes(demand.model.request_bytes)
    if any(verdict.reason is None for verdict in verdicts):
        return Answer(f"{name} asks for {asked} and fits; the binder will place it, if it runs", verdicts)
    return Answer(f"{name} asks for {asked}; {summary(verdicts)}", verdicts)


async def _judge(client: KubeClient, demand: Demand, keys: Keys, namespace: str) -> tuple[NodeVerdict, ...]:
    state, fresh = await read_cluster(client, keys, namespace)
    return tuple(judge(demand, view, fresh=fresh(view.facts.name)) for view in state.views())


def _rows(verdict: NodeVerdict) -> list[tuple[str, str, str, str]]:
    name = verdict.view.facts.name
    if not verdict.gpus:
        return [(name, "-", "-", sentence(verdict.reason) if verdict.reason else "")]
    return [
        (
            name,
            f"{gpu.gpu.index} {gpu.gpu.product}",
            "?" if (free := verdict.view.free_on(gpu.gpu)) is None else format_bytes(free),
            sentence(gpu.reason) if gpu.reason else "fits",
        )
        for gpu in verdict.gpus
    ]


def _node_json(verdict: NodeVerdict) -> dict[str, Any]:
    return {
        "node": verdict.view.facts.name,
        "reason": None if verdict.reason is None else verdict.reason.kind.value,
        "detail": "" if verdict.reason is None else verdict.reason.detail,
        "gpus": [
            {
                "uuid": gpu.gpu.uuid,
                "index": gpu.gpu.index,
                "freeBytes": verdict.view.free_on(gpu.gpu),
                "reason": None if gpu.reason is None else gpu.reason.kind.value,
                "shortBytes": None if gpu.reason is None else gpu.reason.short_bytes,
            }
            for gpu in verdict.gpus
        ],
    }
