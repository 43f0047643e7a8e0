"""What `berth why` says of a pod that has a node, from what kubelet, agent and Lease tell."""

import io
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import Failure, ModelState, NodeReport, TritonReport
from berth.contract.text import one_line
from binder.cache.view import NodeFacts, NodeView
from binder.cli.answer import Answer, ProgressShown
from binder.cli.pod_facts import Facts, Unread
from binder.cli.progress import Progress, Stage, progress
from binder.engine.explain import NodeVerdict
from binder.rules.rule import Reason
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
ESCAPE = "\x1b]0;owned\x07\u202e"


def at(minutes_ago: float) -> str:
    return (NOW - timedelta(minutes=minutes_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(code: int, message: str = "", *, reason: str = "Error", minutes_ago: float = 1) -> Json:
    run = {"exitCode": code, "reason": reason, "message": message}
    return {"terminated": {**run, "startedAt": at(minutes_ago + 2), "finishedAt": at(minutes_ago)}}


def waiting(reason: str, message: str = "") -> Json:
    return {"waiting": {"reason": reason, "message": message}}


RUNNING: Json = {"running": {"startedAt": at(3)}}
PULLING = waiting("PodInitializing")
CRASH = waiting("CrashLoopBackOff", "back-off 40s restarting failed container=loader")
DONE = ended(0, reason="Completed")


@dataclass
class Case:
    """A pod on node n1. `loader`, `proxy`: the states of its containers; None: none is told."""

    loader: Json | None = None
    loader_before: Json = field(default_factory=dict)
    restarts: int = 0
    proxy: Json | None = None
    proxy_before: Json = field(default_factory=dict)
    ready: bool = False
    conditions: dict[str, str] = field(default_factory=dict)
    state: ModelState | None = None
    reason: str = ""
    failure: Failure | None = None
    choice: GpuChoice | str | None = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
    annotations: Json = field(default_factory=dict)
    owner: bool = True
    pod_changes: Json = field(default_factory=dict)
    more_inits: list[Json] = field(default_factory=list)
    meta: Json = field(default_factory=dict)
    status: Json = field(default_factory=dict)
    node: Json | Unread | None = None
    lease: Json | Unread | None = field(
        default_factory=lambda: {"spec": {"renewTime": at(0.1), "leaseDurationSeconds": 40}}
    )
    no_node: bool = False

    def facts(self) -> Facts:
        return Facts(
            pod=self.pod(),
            node=None if self.no_node else self.node or self._node(),
            lease=self.lease,
            now=NOW,
        )

    def pod(self) -> Json:
        made = pod(
            on="n1",
            choice=self.choice,
            annotations=self.annotations,
            **{"initContainers": [{"name": "loader"}], **self.pod_changes},
        )
        made["metadata"] |= {
            "ownerReferences": [{"uid": "rs", "controller": True}] if self.owner else []
        } | self.meta
        said = {
            "PodScheduled": "True",
            **({"Initialized": "True"} if self.loader == DONE else {}),
        } | self.conditions
        loader = {
            "name": "loader",
            "state": self.loader,
            "lastState": self.loader_before,
            "restartCount": self.restarts,
        }
        proxy = {
            "name": "proxy",
            "state": self.proxy or PULLING,
            "lastState": self.proxy_before,
            "ready": self.ready,
        }
        made["status"] = {
            "phase": "Pending",
            "conditions": [{"type": t, "status": s, "lastTransitionTime": at(5)} for t, s in said.items()],
            **(
                {}
                if self.loader is None
                else {"initContainerStatuses": [*self.more_inits, loader], "containerStatuses": [proxy]}
            ),
            **self.status,
        }
        return made

    def _node(self) -> Json:
        return node(says=self._report())

    def _report(self) -> NodeReport:
        if self.state is None:
            return report()
        model = replace(listed("p1"), state=self.state, reason=self.reason, failure=self.failure)
        return replace(report(models=(model,)), observed_at=at(1))


def told(case: Case) -> Progress:
    return progress(case.facts(), KEYS, "trtis-scheduler")


SERVED = Case(loader=DONE, proxy=RUNNING, ready=True, conditions={"Ready": "True"}, state=ModelState.READY)
OOM = "failed to load 'm': CUDA out of memory"


def failed_as(failure: Failure | None, **changes: Any) -> Case:
    return Case(loader=CRASH, restarts=2, state=ModelState.FAILED, reason=OOM, failure=failure, **changes)


CASES: dict[str, tuple[Case, Stage, list[str]]] = {
    "nobody has taken it up": (Case(), Stage.SCHEDULED, ["kubelet of the node has not taken it up", at(5)]),
    "image pulled": (
        Case(loader=PULLING),
        Stage.SCHEDULED,
        ["loader has not been started", "pulls its image"],
    ),
    "image missing": (
        Case(loader=waiting("ImagePullBackOff", "Back-off pulling image x")),
        Stage.SCHEDULED,
        ["ImagePullBackOff: Back-off pulling image x"],
    ),
    "loader fails": (
        Case(
            loader=CRASH,
            loader_before=ended(2, "12:00 info starting\nberth loader: --uri: 'x'\nis no URI"),
            restarts=3,
        ),
        Stage.LOADER_FAILING,
        ["container loader, 3 restarts", at(1), "exit code 2: --uri: 'x' is no URI", "back-off 40s"],
    ),
    "loader killed": (
        Case(loader=ended(137, reason="OOMKilled")),
        Stage.LOADER_FAILING,
        [f"since {at(1)} (60 s ago)", "exit code 137 (OOMKilled)"],
    ),
    "ready, nobody tells since when": (
        replace(SERVED, status={"conditions": [{"type": "Ready", "status": "True"}]}),
        Stage.READY,
        ["is ready: its model is served on node n1, GPU 0"],
    ),
    "init status lost, nobody tells since when": (
        replace(
            SERVED, loader=ended(137), status={"conditions": [{"type": "Initialized", "status": "True"}]}
        ),
        Stage.LOADED,
        [],
    ),
    "init status lost": (
        replace(
            SERVED,
            loader=ended(137, reason="ContainerStatusUnknown"),
            conditions={"Ready": "True", "Initialized": "True"},
        ),
        Stage.READY,
        [],
    ),
    "beside a sidecar": (
        Case(
            loader=PULLING,
            pod_changes={"initContainers": [{"name": "mesh", "restartPolicy": "Always"}, {"name": "loader"}]},
            more_inits=[{"name": "mesh", "state": RUNNING}],
        ),
        Stage.SCHEDULED,
        ["container loader has not been started"],
    ),
    "after another": (
        Case(
            loader=PULLING,
            pod_changes={"initContainers": [{"name": "warm-up"}, {"name": "loader"}]},
            more_inits=[{"name": "warm-up", "state": RUNNING}],
        ),
        Stage.SCHEDULED,
        ["container warm-up runs before the loader"],
    ),
    "unknown to the agent": (
        Case(loader=RUNNING),
        Stage.STAGING,
        ["has not listed the pod yet", f"since {at(3)} (3 min ago)"],
    ),
    "staging": (Case(loader=RUNNING, state=ModelState.PENDING), Stage.STAGING, ["fetches the files"]),
    "again": (
        Case(
            loader=RUNNING,
            loader_before=ended(1, "berth loader: HTTP 503"),
            restarts=1,
            state=ModelState.PENDING,
        ),
        Stage.STAGING,
        ["its last run, 1 restart: exit code 1: HTTP 503"],
    ),
    "staged": (Case(loader=RUNNING, state=ModelState.STAGED), Stage.STAGED, ["the load has not begun"]),
    "loading": (
        Case(loader=RUNNING, state=ModelState.LOADING),
        Stage.LOADING,
        [f"report of {at(1)}", f"since {at(3)}"],
    ),
    "loaded": (Case(loader=RUNNING, state=ModelState.READY), Stage.LOADED, ["about to end"]),
    "capacity": (
        failed_as(Failure.CAPACITY),
        Stage.FAILED,
        [OOM, "class is capacity", "evicts it", "keeps away from node n1 for 15 min", "2 restarts"],
    ),
    "transient": (failed_as(Failure.TRANSIENT), Stage.FAILED, ["class is transient", "evicts it"]),
    "invalid": (
        failed_as(Failure.INVALID_MODEL),
        Stage.FAILED,
        ["class is invalid_model", "would fail on every node"],
    ),
    "quarantined": (
        failed_as(Failure.QUARANTINED),
        Stage.FAILED,
        ["class is quarantined", "kubectl annotate node n1 seldon.io/trtis-lift-quarantine=all"],
    ),
    "class untold": (failed_as(None), Stage.FAILED, ["does not tell its class"]),
    "pinned": (
        failed_as(Failure.CAPACITY, annotations={KEYS.server: "pool-a"}),
        Stage.FAILED,
        ["stays here: the pod is pinned to server pool-a"],
    ),
    "nobody would replace it": (
        failed_as(Failure.CAPACITY, owner=False),
        Stage.FAILED,
        ["no controller would replace the pod"],
    ),
    "another scheduler's, failed": (
        failed_as(Failure.CAPACITY, pod_changes={"schedulerName": "kube"}),
        Stage.FAILED,
        ["scheduler kube placed it: the binder does not replace it"],
    ),
    "the binder's last word": (
        failed_as(
            Failure.CAPACITY,
            status={
                "conditions": [
                    {
                        "type": KEYS.loaded_condition,
                        "status": "False",
                        "message": f"{OOM} (it failed on other nodes, too)",
                        "lastTransitionTime": at(7),
                    }
                ]
            },
        ),
        Stage.FAILED,
        ["it stays here: it failed on other nodes, too", f"since {at(7)}"],
    ),
    "ready": (SERVED, Stage.READY, [f"since {at(5)}"]),
    "not ready": (
        replace(SERVED, ready=False, conditions={"Ready": "False"}),
        Stage.LOADED,
        ["container proxy runs", "readiness probe has not succeeded"],
    ),
    "proxy fails": (
        replace(
            SERVED,
            ready=False,
            conditions={"Ready": "False"},
            proxy=ended(3, "berth proxy: --agent: refused"),
        ),
        Stage.LOADED,
        ["container proxy: exit code 3: berth proxy: --agent: refused"],
    ),
    "proxy's image missing": (
        replace(
            SERVED,
            ready=False,
            conditions={"Ready": "False"},
            proxy=waiting("ImagePullBackOff", "Back-off pulling image y"),
        ),
        Stage.LOADED,
        ["container proxy has not been started: ImagePullBackOff Back-off pulling image y"],
    ),
    "proxy fails again and again": (
        replace(
            SERVED,
            ready=False,
            conditions={"Ready": "False"},
            proxy=waiting("CrashLoopBackOff", "back-off 5m0s restarting failed container=proxy"),
            proxy_before=ended(3, "berth proxy: --agent: refused"),
        ),
        Stage.LOADED,
        ["container proxy: exit code 3: berth proxy: --agent: refused", "back-off 5m0s"],
    ),
    "loaded again": (
        replace(SERVED, state=ModelState.STAGED, reason="Triton does not serve it"),
        Stage.STAGED,
        ["Triton does not serve it"],
    ),
    "lost": (
        replace(SERVED, state=ModelState.LOST),
        Stage.LOST,
        [
            "the model's files are gone from the node",
            "the binder evicts it",
            "its controller creates another",
        ],
    ),
    "lost, nobody would replace it": (
        replace(SERVED, state=ModelState.LOST, owner=False),
        Stage.LOST,
        ["no controller would replace the pod; delete it, and create it again"],
    ),
    "lost while it is being loaded": (
        Case(loader=RUNNING, state=ModelState.LOST),
        Stage.LOST,
        ["the model's files are gone from the node"],
    ),
    "no loader": (
        Case(pod_changes={"initContainers": []}, state=ModelState.PENDING),
        Stage.STAGING,
        ["an init container that runs `berth loader` sends them"],
    ),
    "unlisted": (
        replace(SERVED, ready=False, conditions={}, state=None),
        Stage.UNKNOWN,
        ["does not list its model"],
    ),
    "unloading": (
        replace(
            SERVED,
            state=ModelState.UNLOADING,
            meta={"deletionTimestamp": at(1), "deletionGracePeriodSeconds": 60},
        ),
        Stage.UNLOADING,
        [f"since {at(2)}", "reserved until it is gone", "should have ended 60 s ago"],
    ),
    "draining": (
        replace(SERVED, meta={"deletionTimestamp": at(-1), "finalizers": ["x/y"]}),
        Stage.UNLOADING,
        ["still ready: the proxy finishes", "finalizers keep it: x/y"],
    ),
    "a grace period beyond all time": (
        replace(SERVED, meta={"deletionTimestamp": at(-1), "deletionGracePeriodSeconds": 2**63 - 1}),
        Stage.UNLOADING,
        ["is being deleted"],
    ),
    "deleted before it had a node": (
        Case(pod_changes={"nodeName": None}, no_node=True, choice=None, meta={"deletionTimestamp": at(-1)}),
        Stage.UNLOADING,
        ["team/p1 is being deleted", "it has never had a node"],
    ),
    "gone from the node": (
        replace(SERVED, state=None, meta={"deletionTimestamp": at(-1)}),
        Stage.UNLOADING,
        ["its model is gone from the node"],
    ),
    "ended": (
        Case(loader=ended(1, "no\nweights"), status={"phase": "Failed"}, state=ModelState.UNLOADING),
        Stage.ENDED,
        [
            "has ended (Failed)",
            "container loader: exit code 1: weights",
            "still unloading",
            "its memory is reserved",
        ],
    ),
    "evicted": (
        Case(status={"phase": "Failed", "reason": "OutOfcpu", "message": "not enough cpu"}),
        Stage.ENDED,
        ["OutOfcpu: not enough cpu"],
    ),
    "no model pod": (
        Case(pod_changes={"containers": [{"name": "web"}]}, choice=None),
        Stage.NO_MODEL,
        ["none of its containers requests seldon.io/trtis-gpu-mem"],
    ),
    "no GPU chosen": (Case(choice=None), Stage.SCHEDULED, ["no GPU was chosen for it"]),
    "damaged": (Case(choice="{"), Stage.SCHEDULED, ["does not take the pod: annotation"]),
    "no heartbeat": (
        replace(SERVED, lease={"spec": {"renewTime": at(10), "leaseDurationSeconds": 40}}),
        Stage.READY,
        ["given no heartbeat for 10 min: what it has reported may be out of date"],
    ),
    "a report that is not the current one": (
        Case(
            loader=RUNNING,
            state=ModelState.PENDING,
            lease={
                "metadata": {"annotations": {KEYS.report_behind: "422 Invalid: too long"}},
                "spec": {"renewTime": at(0.1), "leaseDurationSeconds": 40},
            },
        ),
        Stage.STAGING,
        ["node n1's agent cannot write its report: 422 Invalid: too long", "may be out of date"],
    ),
    "no Lease": (replace(SERVED, lease=None), Stage.READY, ["no heartbeat of Berth's agent"]),
    "no rights": (
        Case(loader=RUNNING, node=Unread("403 Forbidden"), lease=Unread("403 Forbidden")),
        Stage.UNKNOWN,
        ["node n1 cannot be read: 403", "heartbeat of node n1's agent cannot be read: 403", "how far it is"],
    ),
    "no report": (Case(loader=RUNNING, node=node()), Stage.UNKNOWN, ["node n1 has no report of an agent"]),
    "report unreadable": (
        Case(loader=RUNNING, node=node(says="{")),
        Stage.UNKNOWN,
        ["report of node n1 cannot be read"],
    ),
    "node gone": (Case(loader=RUNNING, no_node=True), Stage.UNKNOWN, ["node n1 does not exist any more"]),
    "Triton away": (
        Case(loader=RUNNING, node=node(says=report(triton=TritonReport(False, "")))),
        Stage.STAGING,
        ["the Triton of node n1 does not answer"],
    ),
    "GPU gone": (
        Case(node=node(says=report(gpu("GPU-b")))),
        Stage.SCHEDULED,
        ["GPU GPU-a is not on node n1 any more"],
    ),
    "GPU broken": (
        Case(
            loader=DONE,
            proxy=RUNNING,
            node=node(says=report(gpu(healthy=False, broken=True, reason="XID 79"), models=(listed("p1"),))),
        ),
        Stage.LOADED,
        ["GPU 0 (GPU-a) of node n1 is not healthy: XID 79", "the binder evicts it", "another GPU has room"],
    ),
    "GPU sick": (
        Case(node=node(says=report(gpu(healthy=False, reason="XID 79")))),
        Stage.SCHEDULED,
        ["GPU 0 (GPU-a) of node n1 is not healthy: XID 79"],
    ),
    "node not ready": (
        Case(
            node={
                **node(says=report()),
                "status": {
                    "conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
                },
            }
        ),
        Stage.SCHEDULED,
        ["node n1 is not ready: NodeStatusUnknown"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pod_s_stage_and_why_it_is_no_further(name: str) -> None:
    case, stage, words = CASES[name]
    found = told(case)
    text = "\n".join([found.message, *found.details])
    assert found.stage is stage, text
    assert found.message.startswith("team/p1 ")
    for word in words:
        assert word in text


def shown(found: Progress) -> str:
    """All that is told, but for when each phase was reached."""
    since = f" since {found.since}" if found.since else ""
    return "\n".join(
        [f"{found.stage.value}{since}: {found.message}", *(f"  {line}" for line in found.details)]
    )


PAGE = Path(__file__).with_name("progress.txt")


def test_the_page_shows_what_each_pod_s_owner_reads() -> None:
    """Word for word, and in this order: what is said too much is as wrong as what is missing."""
    page = "\n\n".join(f"# {name}\n{shown(told(case))}" for name, (case, *_) in CASES.items())
    assert page + "\n" == PAGE.read_text()


def test_what_the_agent_says_of_a_load_stands_first_and_alone() -> None:
    found = told(Case(loader=RUNNING, state=ModelState.LOADING, reason="waits for its turn"))
    assert found.details[0] == "waits for its turn"
    assert "Triton loads the model" not in found.details


def test_nothing_is_wrong_with_a_pod_that_serves() -> None:
    found = told(SERVED)
    assert (
        found.message == f"team/p1 is ready: its model is served on node n1, GPU 0, since {at(5)} (5 min ago)"
    )
    assert found.details == ()
    assert found.times == {
        "created": "2026-01-01T00:00:00Z",
        "scheduled": at(5),
        "loader started": at(3),
        "loaded": at(1),
        "ready": at(5),
    }


@pytest.mark.parametrize("state", ModelState)
@pytest.mark.parametrize("failure", [None, *Failure])
def test_every_state_that_an_agent_may_report_has_an_answer(
    state: ModelState, failure: Failure | None
) -> None:
    for case in (Case(loader=RUNNING), SERVED, Case(loader=RUNNING, meta={"deletionTimestamp": at(0)})):
        assert told(replace(case, state=state, failure=failure)).stage is not Stage.NO_MODEL


def test_what_others_have_written_does_not_reach_the_terminal_as_it_is() -> None:
    long = ESCAPE + "x" * 100_000
    case = Case(
        loader=waiting("CrashLoopBackOff" + ESCAPE, long),
        loader_before=ended(1, long),
        restarts=1,
        state=ModelState.FAILED,
        reason=long,
        failure=Failure.CAPACITY,
        annotations={KEYS.model_id: ESCAPE},
        pod_changes={"schedulerName": "s" + ESCAPE},
        node=None,
    )
    shown = ProgressShown(told(case))
    out = io.StringIO()
    shown.show(Console(file=out, soft_wrap=True))
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    assert len(out.getvalue()) < 5000
    assert len(json.dumps(shown.to_json())) < 5000


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        (" two\n lines\t", "two lines"),
        ("a\x1b[31mb\x00c", "a [31mb c"),
        ("\u202eabc\u2066", "abc"),
        ("x" * 11, "x" * 9 + "…"),
        ("\x07" * 1000, "…"),
        ("", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text, limit=10) == line


def test_a_verdict_on_a_node_is_shown_without_control_characters() -> None:
    verdict = NodeVerdict(NodeView(NodeFacts(NodeName("n1"), {}, (), False, {}, None)), None, ())
    reason = Reason("UnreadableNodeReport", ESCAPE + "no JSON")
    answer = Answer("asks" + ESCAPE, False, "help" + ESCAPE, (replace(verdict, reason=reason),))
    out = io.StringIO()
    answer.show(Console(file=out, soft_wrap=True))
    assert "no JSON" in out.getvalue()
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
