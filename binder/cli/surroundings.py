"""What is wrong around a pod that has a node: the node, its agent, the GPUs chosen, the scheduler that chose them. Pure."""

from collections.abc import Iterator

from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, has_ended, node_of
from berth.contract.report import NodeReport
from binder.cli.pod_facts import Facts, JsonObject, Unread, asked, duration, moment, next_step, report_of
from binder.loop.verdict import Cause, cause_of, gpu_failure, node_gone
from binder.pod.conditions import conditions


def surroundings(facts: Facts, keys: Keys, scheduler_name: str) -> Iterator[str]:
    """One sentence for each failure."""
    pod, node, ask = facts.pod, node_of(facts.pod), asked(facts.pod, keys)
    if isinstance(ask, Unread):
        yield f"the agent does not take the pod: {ask.why}"
    elif ask.gpu is None and node is not None:
        yield (
            "no GPU was chosen for it: something else than the binder gave it its node, and the agent does not load it"
        )
    if (placed_by := pod["spec"].get("schedulerName")) != scheduler_name:
        yield f"scheduler {placed_by} placed it: the binder does not replace it if its load fails"
    if node is None or has_ended(pod):
        return
    yield from _of_the_node(facts.node, node)
    yield from _of_the_agent(facts, node, keys)
    report = report_of(facts, keys)
    if isinstance(report, Unread):
        yield report.why
    else:
        yield from _of_the_report(report, node, None if isinstance(ask, Unread) else ask)
        gpus = {gpu.uuid: gpu for gpu in report.gpus}
        model = report.model_of(pod["metadata"].get("uid", ""))
        if model is not None and cause_of(model, gpus) is Cause.GPU_BROKEN:
            yield next_step(facts, keys, scheduler_name, Cause.GPU_BROKEN)


def _of_the_node(node: JsonObject | Unread | None, name: str) -> Iterator[str]:
    if node is None:
        yield node_gone(name).message
    elif isinstance(node, Unread):
        yield f"node {name} cannot be read: {node.why}"
    else:
        ready = conditions(node).get("Ready")
        if ready is not None and ready.get("status") != "True":
            message = ready.get("message")
            yield f"node {name} is not ready: {ready.get('reason') or '?'}{': ' if message else ''}{message or ''}"


def _of_the_agent(facts: Facts, node: str, keys: Keys) -> Iterator[str]:
    if isinstance(facts.lease, Unread):
        yield f"the heartbeat of node {node}'s agent cannot be read: {facts.lease.why}"
        return
    if facts.lease is None:
        yield f"node {node} has no heartbeat of Berth's agent: none has ever run there, or its Lease was deleted"
        return
    spec = facts.lease.get("spec") or {}
    last = moment(spec.get("renewTime"))
    if last is None:
        yield f"node {node}'s agent has never given a heartbeat"
    elif (facts.now - last).total_seconds() >= float(spec.get("leaseDurationSeconds") or 0):
        silence = duration(facts.now - last)
        yield f"node {node}'s agent has given no heartbeat for {silence}: what it has reported may be out of date"
    behind = ((facts.lease.get("metadata") or {}).get("annotations") or {}).get(keys.report_behind)
    if behind:
        yield f"node {node}'s agent cannot write its report: {behind}; what stands there may be out of date"


def _of_the_report(report: NodeReport, node: str, ask: ModelPod | None) -> Iterator[str]:
    if not report.triton.ready:
        yield f"the Triton of node {node} does not answer: no model is loaded until it does"
    gpus = {gpu.uuid: gpu for gpu in report.gpus}
    for chosen in () if ask is None or ask.gpu is None else ask.gpu.gpus:
        if (failure := gpu_failure(chosen.uuid, gpus.get(chosen.uuid), node)) is not None:
            yield failure.message
