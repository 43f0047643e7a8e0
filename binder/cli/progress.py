"""How far a pod that has a node is on its way to serve, since when, and why it is not further. Pure.

Three parties tell of it: the pod's status (kubelet), the node's report (agent), the agent's Lease. What could not be
read is not known, and is said to be so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from berth.contract.keys import Keys
from berth.contract.pod import has_ended, is_deleting, is_model_pod, node_of
from berth.contract.report import Failure, ModelReport, ModelState
from berth.contract.text import one_line
from berth.kube.times import rfc3339
from binder.cli.pod_facts import Facts, JsonObject, Unread, asked, duration, moment, next_step, report_of
from binder.cli.surroundings import surroundings
from binder.loop.verdict import Cause
from binder.pod.conditions import conditions, is_true, reported_failure
from binder.pod.containers import Container, Ended, init_containers, main_containers

_MOST_DETAILS = 20
_LONGEST_GRACE_SECONDS = 10**9  # the API takes any number


class Stage(str, Enum):
    """In the order in which a pod goes through them, as far as all goes well."""

    SCHEDULED = "scheduled"  # its loader has not been started
    LOADER_FAILING = "loader-failing"  # an init container ends with an error, again and again
    STAGING = "staging"  # the model's files are being fetched and sent to the node
    STAGED = "staged"  # they are complete; the load has not begun
    LOADING = "loading"
    FAILED = "failed"  # Triton does not load it
    LOADED = "loaded"  # Triton serves it, the pod is not ready
    READY = "ready"
    LOST = "lost"  # its files are gone from the node
    UNLOADING = "unloading"
    ENDED = "ended"
    UNKNOWN = "unknown"  # the node does not tell
    NO_MODEL = "no-model"  # the pod is none of Berth's


@dataclass(frozen=True, slots=True)
class Progress:
    """`since`: RFC 3339, "" where it is unknown. `details`: why it is not further, what comes next, and what
    is wrong around it. `times`: when each phase was reached."""

    stage: Stage
    message: str
    since: str
    details: tuple[str, ...]
    times: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Finding:
    stage: Stage
    what: str
    since: str = ""
    details: tuple[str, ...] = ()
    timed: str = ""  # what it is that has been so since then, if not the stage itself


def progress(facts: Facts, keys: Keys, scheduler_name: str) -> Progress:
    """Of a pod that has a node, has ended or is being deleted. Never fails."""
    look = _Look(facts, keys, scheduler_name)
    found = look.finding()
    since = moment(found.since)
    age = (
        "" if since is None else f"{found.timed}, since {rfc3339(since)} ({duration(facts.now - since)} ago)"
    )
    around = () if found.stage is Stage.NO_MODEL else surroundings(facts, keys, scheduler_name)
    details = dict.fromkeys(one_line(detail) for detail in (*found.details, *around) if detail)
    return Progress(
        stage=found.stage,
        message=one_line(f"{look.name} {found.what}{look.place}{age}"),
        since="" if since is None else rfc3339(since),
        details=tuple(details)[:_MOST_DETAILS],
        times=look.times(),
    )


class _Look:
    """One look at a pod. Each rule gives a finding, or None where it does not apply."""

    def __init__(self, facts: Facts, keys: Keys, scheduler_name: str) -> None:
        self._facts, self._keys, self._scheduler_name = facts, keys, scheduler_name
        self._pod, self._status = facts.pod, facts.pod.get("status") or {}
        meta = self._pod["metadata"]
        self.name = f"{meta.get('namespace', '')}/{meta['name']}"
        self._node = node_of(self._pod)
        self._conditions = conditions(self._pod)
        self._inits, self._mains = init_containers(self._pod), main_containers(self._pod)
        ask, report = asked(self._pod, keys), report_of(facts, keys)
        self._ask = None if isinstance(ask, Unread) else ask
        self._report = None if isinstance(report, Unread) else report
        self._model = None if self._report is None else self._report.model_of(meta.get("uid", ""))

    @property
    def place(self) -> str:
        """On which node and GPUs."""
        if self._node is None:
            return ""
        gpu = None if self._ask is None else self._ask.gpu
        if gpu is None:
            return f" on node {self._node}"
        indexes = ", ".join(str(one.index) for one in gpu.gpus)
        return f" on node {self._node}, GPU {indexes}"

    def finding(self) -> _Finding:
        rules = (self._stranger, self._ended, self._deleted, self._failed, self._initialising)
        found = (rule() for rule in rules)
        return next((one for one in found if one is not None), None) or self._serving()

    def times(self) -> dict[str, str]:
        """When each phase was reached, in order; what has not been is left out."""
        loader = next((one for one in self._inits if one.is_loader), None)
        run = None if loader is None else loader.ended
        began = "" if loader is None else run.started if run is not None else loader.running_since or ""
        reached = {
            "created": self._pod["metadata"].get("creationTimestamp") or "",
            "scheduled": self._since("PodScheduled", "True"),
            "loader started": began,
            "loaded": run.at if run is not None and run.code == 0 else "",
            "ready": self._since("Ready", "True"),
            "deleted": self._deleted_at(),
        }
        moments = {phase: moment(text) for phase, text in reached.items()}
        return {phase: rfc3339(moment) for phase, moment in moments.items() if moment is not None}

    def _stranger(self) -> _Finding | None:
        if is_model_pod(self._pod, self._keys):
            return None
        why = f"none of its containers requests {self._keys.gpu_mem}, and the binder has chosen no GPU for it"
        return _Finding(Stage.NO_MODEL, "is no model pod", details=(why,))

    def _ended(self) -> _Finding | None:
        if not has_ended(self._pod):
            return None
        runs = [(c.name, c.ended) for c in (*self._inits, *self._mains) if c.ended is not None]
        since = max((run.at for _, run in runs), default="")
        reason, message = (self._status.get(key) or "" for key in ("reason", "message"))
        why = (f"{reason}: {message}" if reason and message else reason or message,)
        failed = tuple(f"container {name}: {run}" for name, run in runs if run.code != 0)
        details = (*why, *failed, self._still_there())
        return _Finding(Stage.ENDED, f"has ended ({self._status.get('phase')})", since, details)

    def _still_there(self) -> str:
        if self._model is None:
            return ""
        return (
            f"its model is still {self._model.state.value} there, and its memory is reserved until it is gone"
        )

    def _deleted(self) -> _Finding | None:
        if not is_deleting(self._pod):
            return None
        details = [self._unloading()]
        deadline = moment(self._pod["metadata"].get("deletionTimestamp") or "")
        if deadline is not None and self._facts.now > deadline:
            late = duration(self._facts.now - deadline)
            details.append(f"it should have ended {late} ago: the node's kubelet has not said that it has")
        if finalizers := self._pod["metadata"].get("finalizers"):
            details.append(f"finalizers keep it: {', '.join(finalizers)}")
        return _Finding(Stage.UNLOADING, "is being deleted", self._deleted_at(), tuple(details))

    def _unloading(self) -> str:
        if self._node is None:
            return "it has never had a node, and nothing of it is loaded"
        if self._report is None:
            return "whether its model is still loaded is not known"
        if self._model is None:
            return "its model is gone from the node; its containers are still ending"
        if self._model.state is ModelState.UNLOADING:
            return "Triton lets the model's last requests finish; its memory stays reserved until it is gone"
        return f"its model is still {self._model.state.value}: the proxy finishes its requests, then it is unloaded"

    def _failed(self) -> _Finding | None:
        model = self._model
        if model is None or model.state is not ModelState.FAILED:
            return None
        loader, reported = self._current_init(), reported_failure(self._pod, self._keys)
        stays = _reported_stay(reported, model)
        details = (
            f"Triton's reason: {model.reason or 'none is reported'}",
            _CLASSES.get(model.failure, f"its class is {model.failure}"),
            f"it stays here: {stays}" if stays else self._next_step(Cause.LOAD_FAILED, model.failure),
            "" if loader is None else _retried(loader),
        )
        last = None if loader is None else loader.ended or loader.before
        since = reported.get("lastTransitionTime") or ("" if last is None else last.at)
        return _Finding(Stage.FAILED, "failed to load", since, details)

    def _next_step(self, cause: Cause, failure: Failure | None = None) -> str:
        return next_step(self._facts, self._keys, self._scheduler_name, cause, failure)

    def _current_init(self) -> Container | None:
        return next((one for one in self._inits if not one.has_done_its_part), None)

    def _initialising(self) -> _Finding | None:
        current = self._current_init()
        if current is None or is_true(self._pod, "Initialized"):
            return None
        if current.failure is not None:
            return self._loader_fails(current, current.failure)
        if current.running_since is not None:
            return self._loader_runs(current) if current.is_loader else self._other_runs(current)
        why = f"container {current.name} has not been started: {_why_not_started(current)}"
        return _Finding(Stage.SCHEDULED, "has been scheduled", self._since("PodScheduled", "True"), (why,))

    def _loader_fails(self, container: Container, failure: Ended) -> _Finding:
        details = (
            f"container {container.name}{container.again}, ended at {failure.at}: {failure}",
            "" if container.waiting is None else container.waiting_message or container.waiting,
            ""
            if self._model is None
            else f"the node's report: {self._model.state.value} {self._model.reason}",
        )
        since = "" if container.restarts else failure.at
        return _Finding(Stage.LOADER_FAILING, f"fails in container {container.name}", since, details)

    def _other_runs(self, current: Container) -> _Finding:
        why = f"container {current.name} runs before the loader{current.again}"
        return _Finding(Stage.SCHEDULED, "has been scheduled", current.running_since or "", (why,))

    def _loader_runs(self, loader: Container) -> _Finding:
        since = loader.running_since or ""
        before = "" if loader.before is None else f"its last run{loader.again}: {loader.before}"
        if self._report is None:
            why = f"container {loader.name} runs; how far it is, only the node's report could tell"
            return _Finding(Stage.UNKNOWN, "is being loaded", since, (why, before))
        stage, what, why = _under_way(ModelState.PENDING if self._model is None else self._model.state)
        unlisted = "the agent has not listed the pod yet"
        if self._model is not None:
            why, unlisted = self._model.reason or why, ""  # what the agent says is nearer to the matter
        dated = f"so says the node's report of {self._report.observed_at}"
        return _Finding(stage, what, since, (why, unlisted, dated, before), timed="; its loader runs")

    def _serving(self) -> _Finding:
        """Its init containers are done, or it has none."""
        model = self._model
        if model is not None and model.state is not ModelState.READY:
            return self._not_served(model)
        if is_true(self._pod, "Ready"):
            unlisted = "the node's report does not list its model" if self._report and model is None else ""
            return _Finding(
                Stage.READY, "is ready: its model is served", self._since("Ready", "True"), (unlisted,)
            )
        since, not_ready = self._since("Ready", "False"), self._not_ready()
        if model is not None:
            return _Finding(Stage.LOADED, "is loaded, but not ready", since, not_ready)
        unlisted = "the agent does not list its model" if self._report is not None else ""
        return _Finding(Stage.UNKNOWN, "is not ready", since, (unlisted, *not_ready))

    def _not_served(self, model: ModelReport) -> _Finding:
        stage, what, why = _under_way(model.state)
        if model.state is ModelState.PENDING:
            why = "no files have come for it: an init container that runs `berth loader` sends them"
        lost = self._next_step(Cause.FILES_LOST) if model.state is ModelState.LOST else ""
        return _Finding(stage, what, "", (model.reason, why, lost, *self._not_ready()))

    def _not_ready(self) -> tuple[str, ...]:
        """Of its main containers."""
        message = (self._conditions.get("Ready") or {}).get("message") or ""
        return (*(_why_not_ready(one) for one in self._mains if not one.ready), message)

    def _since(self, condition: str, status: str) -> str:
        """Since when the pod's condition has that status; "" where it has another."""
        found = self._conditions.get(condition) or {}
        return (found.get("lastTransitionTime") or "") if found.get("status") == status else ""

    def _deleted_at(self) -> str:
        """A deletion's timestamp is when the pod has to be gone: its grace period is before it."""
        meta = self._pod["metadata"]
        deadline = moment(meta.get("deletionTimestamp") or "")
        if deadline is None:
            return ""
        grace = min(meta.get("deletionGracePeriodSeconds") or 0, _LONGEST_GRACE_SECONDS)
        return rfc3339(deadline - timedelta(seconds=grace))


def _reported_stay(reported: JsonObject, model: ModelReport) -> str:
    """Why the pod stays, as the binder has reported it: it knows of other nodes and earlier tries."""
    message = str(reported.get("message") or reported.get("reason") or "")
    return message.removeprefix(model.reason).strip(" ()")


_CLASSES = {
    Failure.CAPACITY: "its class is capacity: the memory of that GPU did not do, and another may",
    Failure.TRANSIENT: "its class is transient: the node or its Triton failed, and another node may do",
    Failure.INVALID_MODEL: "its class is invalid_model: the same files would fail anywhere",
    Failure.QUARANTINED: "its class is quarantined: these files took Triton down, and no node tries them",
    None: "the agent does not tell its class",
}
# Stage, what is said of the pod, and why it is no further.
_UNDER_WAY = {
    ModelState.PENDING: (
        Stage.STAGING,
        "waits for its files",
        "the loader fetches the files and sends them to the node",
    ),
    ModelState.STAGED: (Stage.STAGED, "has its files", "all files are there; the load has not begun"),
    ModelState.LOADING: (Stage.LOADING, "is being loaded", "Triton loads the model"),
    ModelState.READY: (Stage.LOADED, "is loaded", "Triton serves the model; the loader is about to end"),
    ModelState.UNLOADING: (
        Stage.UNLOADING,
        "is being unloaded",
        "what was loaded before is taken out of Triton",
    ),
    ModelState.FAILED: (Stage.FAILED, "failed to load", ""),
    ModelState.LOST: (
        Stage.LOST,
        "has lost its files",
        "the model's files are gone from the node",
    ),
}


def _under_way(state: ModelState) -> tuple[Stage, str, str]:
    return _UNDER_WAY.get(state, (Stage.UNKNOWN, f"is {state.value}", ""))


def _why_not_started(container: Container) -> str:
    if container.waiting is None:
        return "the kubelet of the node has not taken it up"
    if container.waiting in ("", "PodInitializing", "ContainerCreating"):
        return "the kubelet pulls its image or mounts its volumes"
    return f"{container.waiting}: {container.waiting_message}"


def _retried(loader: Container) -> str:
    """What the kubelet does about a loader whose model failed to load."""
    if loader.running_since is not None:
        return f"container {loader.name} runs again{loader.again}: it sends the files once more"
    if loader.restarts:
        return f"container {loader.name}{loader.again}: {loader.waiting_message or loader.waiting or ''}"
    return ""


def _why_not_ready(container: Container) -> str:
    """Why a container of a pod whose model is loaded is not ready."""
    name = f"container {container.name}{container.again}"
    if (failure := container.failure) is not None:
        return "; ".join(filter(None, (f"{name}: {failure}", container.waiting_message or container.waiting)))
    if container.running_since is not None:
        since = f" since {container.running_since}" if container.running_since else ""
        return f"{name} runs{since}, and its readiness probe has not succeeded"
    return f"{name} has not been started: {container.waiting or 'the kubelet tells no reason'} {container.waiting_message}"
