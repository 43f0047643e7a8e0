"""What is read of one pod, its node and its node's agent, to tell how the pod is. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, parse_model_pod
from berth.contract.report import Failure, NodeReport
from berth.kube.times import parse_time
from binder.cache.view import parse_node
from binder.loop.verdict import BoundPod, Cause, verdict

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unread:
    """Something that could not be read, and why: nothing is known of it."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`lease`: the heartbeat of the node's agent. None: it does not exist."""

    pod: JsonObject
    node: JsonObject | Unread | None = None
    lease: JsonObject | Unread | None = None
    now: datetime


def asked(pod: JsonObject, keys: Keys) -> ModelPod | Unread:
    """What the pod requests."""
    try:
        return parse_model_pod(pod, keys)
    except InvalidPod as error:
        return Unread(str(error))


def report_of(facts: Facts, keys: Keys) -> NodeReport | Unread:
    """The report of the node's agent."""
    if facts.node is None or isinstance(facts.node, Unread):
        return Unread("")  # said of the node already
    node = parse_node(facts.node, keys)
    if node.report is not None:
        return node.report
    if node.report_error:
        return Unread(f"the report of node {node.name} cannot be read: {node.report_error}")
    return Unread(f"node {node.name} has no report of an agent")


def next_step(
    facts: Facts, keys: Keys, scheduler_name: str, cause: Cause, failure: Failure | None = None
) -> str:
    """What the binder does about it."""
    ask = asked(facts.pod, keys)
    pod = BoundPod.of(facts.pod, server=None if isinstance(ask, Unread) else ask.server)
    return verdict(pod, cause, failure, keys=keys, scheduler_name=scheduler_name).next_step


def moment(text: object) -> datetime | None:
    """A time as the API writes it; None where there is none."""
    found = parse_time(text) if isinstance(text, str) and text else None
    return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)


def duration(time: timedelta) -> str:
    """For people: `40 s`, `3 min`, `2 h`, `5 d`."""
    seconds = max(0, int(time.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
