"""Nodes in two zones, and pods beside them: zone a has a1 and a2, zone b has b1, x is in no zone."""

from typing import Any

from berth.contract.ids import NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster
from binder.pod.demand import parse_demand
from binder.rules.registry import FITS, RULES
from tests.fakes.objects import KEYS, gpu, node, pod, report

Json = dict[str, Any]
ZONE, HOST = "zone", "kubernetes.io/hostname"
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)
EVERYWHERE = "a1 a2 b1 x"


def zoned_cluster(*pods: Json, **nodes: Json) -> Cluster:
    """Each node has room for everything. `nodes`: what else is so of one."""
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    for name in EVERYWHERE.split():
        labels = {} if name == "x" else {ZONE: name[0]}
        facts = {"labels": labels, **nodes.get(name, {})}
        cluster.on_node(Change(ChangeKind.SET, node(name, says=report(gpu(f"GPU-{name}")), **facts)))
        cluster.decider.table.beat(NodeName(name), 1.0)
    for name, labels in (("team", {"team": "1"}), ("other", {"kind": "o"}), ("third", {"kind": "t"})):
        cluster.on_namespace(Change(ChangeKind.SET, {"metadata": {"name": name, "labels": labels}}))
    for one in pods:
        cluster.on_pod(Change(ChangeKind.SET, one))
    return cluster


def neighbour(
    uid: str, on: str, app: str = "x", *, ns: str = "team", going: bool = False, **more: Any
) -> Json:
    """A pod on a node that takes no GPU memory."""
    made = pod(uid, mem=None, on=on, annotations={KEYS.model_id: None}, **more)
    made["metadata"] |= {"namespace": ns, "labels": {"app": app}}
    if going:
        made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return made


def asks(app: str = "me", **spec: Any) -> Json:
    """The pod that waits."""
    made = pod("p", **spec)
    made["metadata"]["labels"] = {"app": app, "rev": "1"}
    return made


def allowed(cluster: Cluster, one: Json) -> tuple[str, set[str]]:
    """Where it may go, and why not to the others."""
    codes, table = cluster.decider.codes(parse_demand(one, KEYS)), cluster.decider.table
    fits = sorted(name for name, row in table.row_of.items() if codes[row] == FITS)
    return " ".join(fits), {RULES.rule(int(code)).name for code in codes if code != FITS}


def term(app: str | None = "x", key: str = ZONE, **more: Any) -> Json:
    """Of an affinity: pods of this app, without one no selector."""
    selector = {} if app is None else {"labelSelector": {"matchLabels": {"app": app}}}
    return {"topologyKey": key, **selector, **more}


def near(*terms: Json) -> Json:
    return {"podAffinity": {REQUIRED: list(terms)}}


def apart(*terms: Json) -> Json:
    return {"podAntiAffinity": {REQUIRED: list(terms)}}


def spread(skew: int | None = 1, key: str = ZONE, app: str | None = "me", **more: Any) -> Json:
    """A constraint; without an app it has no selector, with an empty one an empty selector."""
    selector = {} if app is None else {"labelSelector": {"matchLabels": {"app": app} if app else {}}}
    figure = {} if skew is None else {"maxSkew": skew}
    return {"topologyKey": key, **figure, **selector, **more}


def three(**more: Any) -> list[Json]:
    """Pods that count for `spread`: two in zone a, one in zone b."""
    return [neighbour(f"r{i}", on, "me", **more) for i, on in enumerate(("a1", "a2", "b1"))]
