"""How the containers of a pod are, as the pod's status tells it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from berth.contract.text import one_line

JsonObject = Mapping[str, Any]
# How our own processes begin their last words; what follows may have lines of its own.
_LAST_WORDS = "berth loader: "


@dataclass(frozen=True, slots=True)
class Ended:
    """One run of a container that is over. Times as the API writes them, "" where there is none."""

    code: int
    reason: str
    message: str
    started: str
    at: str

    def __str__(self) -> str:
        why = "" if self.reason in ("", "Error", "Completed") else f" ({one_line(self.reason, limit=60)})"
        said = _said(self.message)
        return f"exit code {self.code}{why}{': ' if said else ''}{said}"


@dataclass(frozen=True, slots=True)
class Container:
    """One of `waiting` (its reason, "" where none is given), `running_since` and `ended` says how it is;
    all are None while the kubelet has said nothing. `before`: its last run but this one."""

    name: str
    is_loader: bool
    is_sidecar: bool
    waiting: str | None = None
    waiting_message: str = ""
    running_since: str | None = None
    ended: Ended | None = None
    before: Ended | None = None
    restarts: int = 0
    ready: bool = False

    @property
    def has_done_its_part(self) -> bool:
        """Of an init container: the next one may start."""
        if self.is_sidecar:
            return self.running_since is not None
        return self.ended is not None and self.ended.code == 0

    @property
    def failure(self) -> Ended | None:
        """Its last run, if that failed and none runs now."""
        last = self.ended or (self.before if self.running_since is None else None)
        return last if last is not None and last.code != 0 else None

    @property
    def again(self) -> str:
        return f", {self.restarts} restart{'s' if self.restarts > 1 else ''}" if self.restarts else ""


def init_containers(pod: JsonObject) -> list[Container]:
    """In the order in which they run. The one that downloads the model is the loader by its name or its
    arguments, else the last one."""
    specs = pod["spec"].get("initContainers") or []
    named = [spec["name"] for spec in specs if _is_loader(spec)] or [spec["name"] for spec in specs[-1:]]
    return _containers(pod, specs, "initContainerStatuses", loader=named[0] if named else "")


def main_containers(pod: JsonObject) -> list[Container]:
    return _containers(pod, pod["spec"].get("containers") or [], "containerStatuses", loader="")


def _is_loader(spec: JsonObject) -> bool:
    return spec["name"] == "loader" or "loader" in (*(spec.get("command") or ()), *(spec.get("args") or ()))


def _containers(pod: JsonObject, specs: Iterable[JsonObject], key: str, *, loader: str) -> list[Container]:
    statuses = {one["name"]: one for one in (pod.get("status") or {}).get(key) or ()}
    return [
        _container(spec, statuses.get(spec["name"]) or {}, is_loader=spec["name"] == loader) for spec in specs
    ]


def _container(spec: JsonObject, status: JsonObject, *, is_loader: bool) -> Container:
    state = status.get("state") or {}
    waiting = state.get("waiting")
    running = state.get("running")
    return Container(
        name=spec["name"],
        is_loader=is_loader,
        is_sidecar=spec.get("restartPolicy") == "Always",
        waiting=None if waiting is None else waiting.get("reason") or "",
        waiting_message="" if waiting is None else waiting.get("message") or "",
        running_since=None if running is None else running.get("startedAt") or "",
        ended=_ended(state.get("terminated")),
        before=_ended((status.get("lastState") or {}).get("terminated")),
        restarts=status.get("restartCount") or 0,
        ready=bool(status.get("ready")),
    )


def _ended(state: JsonObject | None) -> Ended | None:
    if state is None:
        return None
    return Ended(
        code=state.get("exitCode") or 0,
        reason=state.get("reason") or "",
        message=state.get("message") or "",
        started=state.get("startedAt") or "",
        at=state.get("finishedAt") or "",
    )


def _said(message: str) -> str:
    """A termination message may be a whole log: its last words are what counts."""
    _, mark, words = message.rpartition(_LAST_WORDS)
    return one_line(words if mark else message.strip().rpartition("\n")[2])
