"""`berth why POD`: why a pod has no place, node by node and GPU by GPU; and how far one is that has a place."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName
from berth.contract.keys import SCHEDULER_NAME, agent_lease_name, agent_lease_namespace
from berth.contract.pod import has_ended, is_deleting, node_of
from berth.contract.text import one_line
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.command import OutputOptions, object_name
from berth.kube.errors import Denied, KubeError, NotFound
from berth.kube.times import parse_time, utc_now
from berth.runtime import options as opt
from berth.runtime.errors import CannotStart, Failed
from berth.runtime.process import run_process
from binder.cli.answer import Answer, ProgressShown, Shown, judge, tell
from binder.cli.pod_facts import Facts, JsonObject, Unread
from binder.cli.progress import progress
from binder.cli.snapshot import read_cluster
from binder.pod.conditions import conditions, reported_reason
from binder.pod.demand import parse_demand

SUMMARY = """Say why a pod does not serve. Of a pod without a node: what each node and GPU lacks, and what would make it
fit. Of a pod with a node: its stage (scheduled, loader-failing, staging, staged, loading, failed, loaded, ready, lost,
unloading, ended), since when, why it is not further, and what Berth does next."""


@dataclass(frozen=True, kw_only=True)
class WhyOptions(OutputOptions):
    """Which pod."""

    pod: str = opt.positional("the pod's name", metavar="POD", parse=object_name)
    namespace: str = opt.option(
        "the pod's namespace", default="default", metavar="NAME", short="-n", parse=object_name
    )
    scheduler_name: str = opt.option("the binder's schedulerName", default=SCHEDULER_NAME, metavar="NAME")


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth why`."""
    return run_process("why", SUMMARY, WhyOptions, main, argv)


async def main(options: WhyOptions, _: asyncio.Event) -> None:
    async with open_client(options.kubeconfig) as client:
        try:
            answer = await _explain(client, options)
        except KubeError as error:
            raise CannotStart(f"API server {client.host}: {error}") from error
    tell(answer, options)


async def _explain(client: KubeClient, options: WhyOptions) -> Shown:
    name = f"{options.namespace}/{options.pod}"
    pod = await _read(client, paths.pod(options.namespace, options.pod))
    if pod is None:
        raise Failed(f"pod {name} does not exist; -n names another namespace")
    node = node_of(pod)
    if node is not None or has_ended(pod) or is_deleting(pod):
        facts = await _facts(client, options, pod, node)
        return ProgressShown(progress(facts, options.key_prefix, options.scheduler_name))
    return replace(await _why_pending(client, options, pod, name), stage="pending")


async def _facts(client: KubeClient, options: WhyOptions, pod: JsonObject, node: NodeName | None) -> Facts:
    if node is None:
        return Facts(pod=pod, now=utc_now())
    return Facts(
        pod=pod,
        node=await _read_if_allowed(client, paths.node(node)),
        lease=await _heartbeat(client, options.system_namespace, node),
        now=utc_now(),
    )


async def _heartbeat(client: KubeClient, namespace: str, node: NodeName) -> JsonObject | Unread | None:
    """The Lease of the node's agent; the one of an earlier version's agent if that was renewed last."""
    name = agent_lease_name(node)
    newer = await _read_if_allowed(client, paths.lease(agent_lease_namespace(namespace), name))
    if isinstance(newer, Unread):
        return newer
    earlier = await _read_if_allowed(client, paths.lease(namespace, name))
    if isinstance(earlier, Unread):
        return newer
    return max((newer, earlier), key=_renewed)


def _renewed(lease: JsonObject | None) -> datetime:
    time = parse_time(((lease or {}).get("spec") or {}).get("renewTime") or "")
    return time or datetime.min.replace(tzinfo=UTC)


async def _read(client: KubeClient, path: str) -> dict[str, Any] | None:
    """None where it does not exist."""
    try:
        return await client.get(path)
    except NotFound:
        return None


async def _read_if_allowed(client: KubeClient, path: str) -> JsonObject | Unread | None:
    """Who may read a pod need not be allowed to read nodes."""
    try:
        return await _read(client, path)
    except Denied as error:
        return Unread(str(error))


async def _why_pending(client: KubeClient, options: WhyOptions, pod: JsonObject, name: str) -> Answer:
    if (actual := pod["spec"].get("schedulerName")) != options.scheduler_name:
        message = f"{name} is not the binder's: its schedulerName is {actual}, not {options.scheduler_name}"
        if options.key_prefix.gpu in (pod["metadata"].get("annotations") or {}):
            message += f"; the annotation {options.key_prefix.gpu} that it carries gives it no GPU"
        return Answer(one_line(message))
    try:
        demand = parse_demand(pod, options.key_prefix)
    except InvalidPod as error:
        return Answer(f"{name} cannot be placed: {error}")
    if demand.gated:
        return Answer(f"{name} waits for its schedulingGates")
    cluster = await read_cluster(client, options.key_prefix, options.system_namespace)
    answer = judge(cluster, demand, name)
    if answer.fits:
        return replace(answer, remedy=_last_word(pod))
    reason = reported_reason(pod)
    return answer if reason is None else replace(answer, reason=reason)


def _last_word(pod: JsonObject) -> str:
    """The binder knows more than the API server: nodes that it leaves out after a failed load, places that it reserves."""
    condition = conditions(pod).get("PodScheduled") or {}
    message = condition.get("message") if condition.get("status") == "False" else ""
    return f"the binder reported last: {one_line(message)}" if message else ""
