"""`berth scale MODEL`: the desired, requested and ready replicas of a model, the load behind them, and what limits them.

The figures come from the leader's admin port, through the API server's proxy. A user who may not read that port, or who asks
while no scaler leads, sees the status that the scaler last wrote on the Deployment, and its age.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey, Scaled
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.command import OutputOptions, console, object_name, plain
from berth.kube.errors import Denied, KubeError, NotFound
from berth.kube.times import parse_time, rfc3339, utc_now
from berth.runtime import options as opt
from berth.runtime.errors import CannotStart, Failed
from berth.runtime.process import run_process
from scaler.config import LEASE, ScalerOptions
from scaler.core.cold_starts import PHASES
from scaler.core.deployments import merged_annotations, read_deployment
from scaler.core.models_view import models_path
from scaler.decision.annotations import GROUP, is_scaled
from scaler.decision.bounds import Activity
from scaler.decision.defaults import BERTH, KPA, read_defaults

SUMMARY = """Show how a model is scaled: desired, requested and ready replicas, how many of them cannot be scheduled and why,
the load in the stable and the panic window, and the last decisions. MODEL is its Deployment."""
ADMIN_PORT: Final[int] = ScalerOptions.admin_listen.port
_TEXT_LIMIT: Final = 4000
_DIRECT: Final = aiohttp.ClientTimeout(total=3.0, sock_connect=1.0)
_AVERAGES: Final = {
    "concurrency": "requests at once",
    "requestsPerSecond": "requests a second",
    "waiting": "requests waiting",
}
_ACTIVITY: Final = {"True": "active", "False": "inactive", "Unknown": "activating"}
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(OutputOptions):
    """Which model."""

    model: str = opt.positional("the name of its Deployment", metavar="MODEL", parse=object_name)
    namespace: str = opt.option(
        "the Deployment's namespace", default="default", metavar="NAME", short="-n", parse=object_name
    )


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth scale`."""
    return run_process("scale", SUMMARY, ScaleOptions, main, argv)


async def main(options: ScaleOptions, _: asyncio.Event) -> None:
    async with open_client(options.kubeconfig) as client:
        try:
            view = await ask(client, options)
        except KubeError as error:
            raise CannotStart(f"API server {client.host}: {error}") from error
    if options.output == "json":
        print(json.dumps(view, indent=2))
    else:
        show(view, console(), utc_now())


async def ask(client: KubeClient, options: ScaleOptions) -> Json:
    """The leader's figures, else what is written; `from` says which. Raises Failed where there is nothing to tell."""
    model = ModelKey(options.namespace, options.model)
    deployment = await _deployment(client, model)
    invalid = _invalid(deployment, model, options.key_prefix)
    try:
        figures = await _of_leader(client, options.system_namespace, model)
    except _LeaderUnavailable as error:
        return {**_written(deployment, model, options.key_prefix), "invalid": invalid, "error": str(error)}
    return {"from": "leader", "error": "", **figures}


class _LeaderUnavailable(Exception):
    """Why the leader gave no status."""


async def _deployment(client: KubeClient, model: ModelKey) -> Json:
    try:
        return await client.get(paths.deployment(model.namespace, model.name))
    except NotFound:
        raise Failed(f"Deployment {model} does not exist; -n names another namespace") from None


def _invalid(deployment: Json, model: ModelKey, keys: Keys) -> str:
    """Why its annotations are refused, by Berth's own defaults. Raises Failed where it has not asked."""
    meta, spec = deployment["metadata"], deployment["spec"]
    template = spec.get("template") or {}
    annotations = merged_annotations(template, meta.get("annotations") or {}, keys)
    if not is_scaled(annotations):
        raise Failed(
            f"Deployment {model} has not asked to be scaled, and keeps its replicas: {spec.get('replicas', 1)}; to ask,"
            f" give its pod template the annotation {GROUP}class: {KPA}"
        )
    try:
        read_deployment(
            model, meta.get("uid", ""), annotations, template, defaults=read_defaults(BERTH), keys=keys
        )
    except InvalidValue as error:
        return str(error)
    return ""


async def _of_leader(client: KubeClient, system_namespace: str, model: ModelKey) -> Json:
    """Raises _LeaderUnavailable."""
    pod, host = await _leader(client, system_namespace)
    try:
        return await client.get(f"{paths.pod(system_namespace, pod)}:{ADMIN_PORT}/proxy{models_path(model)}")
    except NotFound as error:
        if error.reason != "NotFound":  # it is the scaler's own answer, not the API server's about its pod
            raise _LeaderUnavailable(f"the scaler that leads ({pod}) does not scale it yet") from error
        if host is None:
            raise _LeaderUnavailable(f"the scaler that led ({pod}) is gone") from error
    except KubeError as error:
        raise _LeaderUnavailable(f"the scaler that leads ({pod}) cannot be asked: {error}") from error
    return await _asked_directly(f"http://{host}:{ADMIN_PORT}{models_path(model)}", pod)


async def _leader(client: KubeClient, system_namespace: str) -> tuple[str, str | None]:
    """Its pod, and its address where the Lease names one. Raises _LeaderUnavailable."""
    try:
        lease = await client.get(paths.lease(system_namespace, LEASE))
    except NotFound:
        raise _LeaderUnavailable(
            f"no scaler has ever led: there is no Lease {system_namespace}/{LEASE}"
        ) from None
    except Denied as error:
        raise _LeaderUnavailable(f"who leads may not be read: {error}") from error
    spec = lease.get("spec") or {}
    name, _, address = (spec.get("holderIdentity") or "").partition("@")
    if not name:
        raise _LeaderUnavailable("no scaler leads at this moment")
    renewed, seconds = parse_time(spec.get("renewTime")), float(spec.get("leaseDurationSeconds") or 0)
    if renewed is not None and (age := (utc_now() - renewed).total_seconds()) > seconds:
        raise _LeaderUnavailable(
            f"no scaler leads since {_duration(age - seconds)}: {name} stopped renewing its Lease"
        )
    # As the scaler calls itself: its pod, and two words that make it unique.
    return name.rsplit("-", 2)[0], address.rpartition(":")[0] or None


async def _asked_directly(url: str, pod: str) -> Json:
    """Where the scaler is no pod of the cluster. Raises _LeaderUnavailable."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url, timeout=_DIRECT) as response:
            if response.status == 404:
                raise _LeaderUnavailable(f"the scaler that leads ({pod}) does not scale it yet")
            response.raise_for_status()
            view: Json = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise _LeaderUnavailable(
            f"the scaler that leads ({pod}) cannot be asked: {error or 'no answer'}"
        ) from error
    return view


def _written(deployment: Json, model: ModelKey, keys: Keys) -> Json:
    """The status on the Deployment."""
    meta, annotations = deployment["metadata"], deployment["metadata"].get("annotations") or {}
    view: Json = {
        "from": "annotation",
        "namespace": model.namespace,
        "model": model.name,
        "replicas": deployment["spec"].get("replicas", 1),
        "ready": (deployment.get("status") or {}).get("readyReplicas", 0),
    }
    try:
        scaled = Scaled.from_text(annotations[keys.scaled])
    except (KeyError, InvalidValue):
        return view
    return {
        **view,
        "desired": scaled.desired,
        "requested": scaled.requested,
        "pods": {"gated": scaled.gated},
        "capacityLimited": scaled.capacity_limited,
        "message": scaled.message,
        "inPanic": scaled.in_panic,
        "activity": scaled.activity,
        "since": _rfc3339(scaled.since),
        "writtenAt": _written_at(meta, keys.scaled),
    }


def _written_at(meta: Json, key: str) -> str | None:
    """When the writer of the annotation last wrote to the Deployment, as the API server has noted it."""
    for entry in meta.get("managedFields") or ():
        fields = ((entry.get("fieldsV1") or {}).get("f:metadata") or {}).get("f:annotations") or {}
        if f"f:{key}" in fields:
            time: str | None = entry.get("time")
            return time
    return None


def _rfc3339(seconds: float) -> str | None:
    try:
        return rfc3339(datetime.fromtimestamp(seconds, UTC)) if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None


# Tables.


def show(view: Json, to: Console, now: datetime) -> None:
    """What is unknown is left out."""
    head = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _head(view, now):
        head.add_row(Text(name), plain(text, limit=_TEXT_LIMIT))
    to.print(head)
    for table in (_load(view), _decisions(view, now), _cold_starts(view, now)):
        if table.row_count:
            to.print(Text(""), table, sep="\n")


def _head(view: Json, now: datetime) -> Iterator[tuple[str, str]]:
    yield "MODEL", f"{view['namespace']}/{view['model']}"
    if view["from"] == "annotation":
        written = _age(view.get("writtenAt"), now)
        said = f"status of {written} ago" if written else "status on the Deployment"
        yield "FROM", f"{said}: {view['error']}"
    if view.get("invalid"):
        holds = "; the last valid annotations stay in effect" if view["from"] == "leader" else ""
        yield "INVALID", f"{view['invalid']}{holds}"
    if "class" in view:
        yield "CLASS", view["class"]
    if spec := view.get("spec"):
        yield "TARGET", _target(spec)
        yield "SCALE", _scale(spec)
    yield "REPLICAS", _replicas(view)
    if gated := (view.get("pods") or {}).get("gated"):
        yield "GATED", f"scheduling gates block {gated} pods, as a quota does"
    if view.get("capacityLimited"):
        yield (
            "CAPACITY LIMITED",
            f"{view['capacityLimited']} of the desired replicas cannot be scheduled: {view.get('message') or 'no reason given'}",
        )
    elif view.get("message"):
        yield "MESSAGE", view["message"]
    if "activity" in view:
        yield "STATE", _scaled_to_zero(view) if _is_scaled_to_zero(view) else _state(view, now)
    if view.get("buffered"):
        yield "BUFFERED", f"{view['buffered']} requests wait for a replica"


def _target(spec: Json) -> str:
    return (
        f"{spec['target']:g} of {spec['metric']} per replica, over {spec['stableWindowSeconds']} s; in panic from"
        f" {spec['panicThreshold']:g} times as much over {spec['panicWindowSeconds']} s"
    )


def _scale(spec: Json) -> str:
    most = spec["maxScale"] or "any"
    least = spec["minScale"] if spec["minScale"] or spec["scaleToZero"] else 1
    return f"{least} to {most}, initially {spec['initialScale']}"


def _replicas(view: Json) -> str:
    desired, requested = _known(view.get("desired")), _known(view.get("requested"))
    return f"desired {desired}, requested {requested}, ready {view['ready']} (spec.replicas: {_known(view.get('replicas'))})"


def _known(figure: object) -> str:
    """What is not known is shown as unknown, never as 0."""
    return "?" if figure is None else str(figure)


def _is_scaled_to_zero(view: Json) -> bool:
    """It has no replica, none is desired, and nothing would block one."""
    there_is = (
        view.get("desired"),
        view.get("requested"),
        view["ready"],
        view.get("buffered"),
        view.get("message"),
    )
    return not any(there_is) and view["activity"] != Activity.ACTIVE.value


def _scaled_to_zero(view: Json) -> str:
    """Without a leader no request starts a replica."""
    return (
        "scaled to zero: the next request starts a replica" if view["from"] == "leader" else "scaled to zero"
    )


def _state(view: Json, now: datetime) -> str:
    since = _age(view.get("since"), now)
    state = _ACTIVITY.get(view["activity"], "?") + (f" for {since}" if since else "")
    return f"{state}, in panic: no replica is removed until it ends" if view.get("inPanic") else state


def _load(view: Json) -> Table:
    table = Table("LOAD", "STABLE", "PANIC", box=None, pad_edge=False)
    for key, name in _AVERAGES.items():
        averages: Mapping[str, float | None] = view.get(key) or {}
        if averages:
            table.add_row(
                Text(name), *(Text(_average(averages.get(window))) for window in ("stable", "panic"))
            )
    return table


def _average(figure: float | None) -> str:
    return "?" if figure is None else f"{figure:.4g}"


def _decisions(view: Json, now: datetime) -> Table:
    table = Table(
        "DECIDED AT",
        "RECOMMENDED",
        "DESIRED",
        "REQUESTED",
        "READY",
        "PANIC",
        "MESSAGE",
        box=None,
        pad_edge=False,
    )
    for one in reversed(view.get("decisions") or ()):
        figures = (
            _known(one[key] if one[key] != -1 else None)
            for key in ("recommended", "desired", "requested", "ready")
        )
        panic = "yes" if one["inPanic"] else "no"
        table.add_row(
            Text(f"{_age(one['at'], now)} ago"), *map(Text, figures), Text(panic), plain(one["message"])
        )
    return table


def _cold_starts(view: Json, now: datetime) -> Table:
    table = Table("COLD START", "DURATION", "PHASES", box=None, pad_edge=False)
    for one in reversed(view.get("coldStarts") or ()):
        phases = one["phases"]
        parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phases.items())
        took = f"{sum(phases.values()):.3g} s" if PHASES[-1] in phases else "not served"
        table.add_row(Text(f"{_age(one['at'], now)} ago"), Text(took), plain(parts))
    return table


def _age(time: str | None, now: datetime) -> str:
    at = parse_time(time)
    return "" if at is None else _duration((now - at).total_seconds())


def _duration(seconds: float) -> str:
    """In one unit, as kubectl tells ages."""
    whole = max(int(seconds), 0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
