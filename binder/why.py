"""`berth why POD` and `berth would-fit`: why a pod has no place, node by node and GPU by GPU."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.keys import SCHEDULER_NAME
from berth.contract.pod import node_of
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.errors import KubeError, NotFound
from berth.runtime import options as opt
from berth.runtime.errors import EXIT_CRASH, CannotStart
from berth.runtime.process import run_process
from binder.answer import Answer, judge
from binder.demand import parse_demand
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
    answer.print(options)


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
    cluster = await read_cluster(client, options.key_prefix, options.system_namespace)
    return judge(cluster, demand, name)
