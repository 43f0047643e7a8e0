"""Kubernetes' scheduler extender: kube-scheduler decides everything but the GPU, and asks Berth for that.

The same policy, the same state and the same leader as for the binder's own pods, so that both modes
together never give the same bytes twice. Wire: k8s.io/kube-scheduler/extender/v1 (ExtenderArgs,
ExtenderFilterResult, HostPriorityList, ExtenderBindingArgs; Go's own field names, for they have no
JSON tags), with nodeCacheCapable: names, no nodes.

Between filter and bind another pod may take the memory, the binder's own pods CPU, too; then bind says
so, and kube-scheduler tries again. A replica that does not lead sends its caller to the one that does (307).
"""

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from berth.contract import wire
from berth.contract.errors import InvalidPod, InvalidValue
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, is_deleting, is_model_pod, node_of
from berth.kube import paths
from berth.kube.errors import KubeError
from berth.runtime.logs import fields
from binder.api.leader import LeaderOnly
from binder.engine.cluster import slim
from binder.engine.decision import Placement
from binder.engine.explain import reason, sentence
from binder.loop.fenced import PodClient
from binder.loop.scheduler import Scheduler
from binder.pod.demand import Demand, parse_demand
from binder.pod.resources import PODS
from binder.pod.topology_terms import NONE
from binder.rules.registry import FITS

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

BEST_SCORE = 10  # MaxExtenderPriority
_BODY_BYTES = 16 * 1024 * 1024  # the names of twenty thousand nodes and one pod
_BODY = "request body"
_MOST_NAMES = 20_000  # of nodes: kube-scheduler's clusters have 5000
_REMEMBERED = 4096
# What the binder's own pods may have taken since kube-scheduler looked, and what a kubelet would refuse the pod
# for. Not extended resources: kube-scheduler may leave some to other extenders.
_KUBELET_CHECKS = frozenset({"cpu", "memory", "ephemeral-storage", PODS})


class Extender:
    """Three verbs of kube-scheduler's."""

    def __init__(self, scheduler: Scheduler, client: PodClient, leader: LeaderOnly, *, keys: Keys) -> None:
        self._scheduler, self._client, self._leader, self._keys = scheduler, client, leader, keys
        self._decider = scheduler.cluster.decider
        self._learned: OrderedDict[PodUid, None] = OrderedDict()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/filter", self._leader.guard(self._filter))
        app.router.add_post("/prioritize", self._leader.guard(self._prioritize))
        app.router.add_post("/bind", self._leader.guard(self._bind))
        return app

    async def _filter(self, request: web.Request) -> web.StreamResponse:
        args = await _arguments(request)
        names = _node_names(args)
        try:
            demand = self._demand(_pod_of(args))
        except InvalidPod as error:
            return web.json_response({"Error": f"the pod cannot be placed: {error}"})
        self._learn(demand)
        rows, codes = self._decider.table.row_of, self._decider.codes(_gpu_only(demand))
        good, bad = [], {}
        for name in names:
            row = rows.get(NodeName(name))
            if row is not None and codes[row] == FITS:
                good.append(name)
            elif row is None:
                bad[name] = "the node is not known to Berth's binder yet"
            else:
                bad[name] = sentence(
                    reason(self._decider, demand, row, self._decider.rules.rule(int(codes[row])).name)
                )
        # Unresolvable: kube-scheduler's preemption sees no GPU memory, and would end pods in vain.
        return web.json_response({"NodeNames": good, "FailedAndUnresolvableNodes": bad})

    async def _prioritize(self, request: web.Request) -> web.StreamResponse:
        args = await _arguments(request)
        demand = _gpu_only(self._demand(_pod_of(args)))
        names = _node_names(args)
        scores = self._decider.scores(demand)
        rows = [self._decider.table.row_of.get(NodeName(name)) for name in names]
        figures = np.array([-np.inf if row is None else scores[row] for row in rows])
        points = [{"Host": name, "Score": point} for name, point in zip(names, _points(figures), strict=True)]
        return web.json_response(points)

    async def _bind(self, request: web.Request) -> web.StreamResponse:
        asked = wire.convert(await _arguments(request), _Binding, what=_BODY)
        ref = PodRef(asked.namespace, asked.name, asked.uid)
        # A task of the scheduler's: it ends with the leadership, even if a client still waits for the answer.
        error = await self._scheduler.bindings.in_flight(self.place(ref, asked.node))
        return web.json_response({"Error": error})

    async def place(self, ref: PodRef, node: NodeName) -> str:
        """Decide the GPU and bind; "" or what went wrong."""
        try:
            pod = slim(await self._client.get(paths.pod(ref.namespace, ref.name)))
        except KubeError as error:
            return f"pod {ref}: {error}"
        if pod["metadata"]["uid"] != ref.uid or is_deleting(pod) or not is_model_pod(pod, self._keys):
            return f"pod {ref} is not a pending model pod with uid {ref.uid}"
        if node_of(pod) is not None:
            return "" if node_of(pod) == node else f"pod {ref} is on node {node_of(pod)} already"
        try:
            demand = self._demand(pod)
        except InvalidPod as error:
            return f"the pod cannot be placed: {error}"
        if self._scheduler.state.has_place(ref.uid):
            return f"pod {ref} is being placed already"
        asked = _gpu_only(demand, and_amounts=_KUBELET_CHECKS)
        outcome = self._decider.place_on(asked, node)
        if not isinstance(outcome, Placement):
            row = self._decider.table.row_of.get(node)
            why = outcome if row is None else reason(self._decider, asked, row, outcome.rule)
            return f"node {node}: {sentence(why)}"
        self._scheduler.state.assume(demand, node, outcome.gpu)
        error_text = await self._scheduler.bind_assumed(demand, outcome)
        if error_text:
            log.warning("extender's binding failed", extra=fields(pod=ref, node=node, error=error_text))
        return error_text

    def _demand(self, pod: JsonObject) -> Demand:
        """Raises InvalidPod; InvalidValue where it is no pod as an API server gives it."""
        try:
            demand = parse_demand(pod, self._keys)
            hash(
                demand.question
            )  # what is no pod of an API server's shows here, and not in the midst of a decision
            return demand
        except InvalidPod:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidValue(
                f"Pod is not as the API server would give it: {type(error).__name__}: {error}"
            ) from error

    def _learn(self, demand: Demand) -> None:
        """Once for each pod: kube-scheduler asks at every try."""
        uid = demand.model.ref.uid
        if uid not in self._learned:
            self._learned[uid] = None
            self._scheduler.prices.note(demand)
            if len(self._learned) > _REMEMBERED:
                self._learned.popitem(last=False)


def _gpu_only(demand: Demand, *, and_amounts: frozenset[str] = frozenset()) -> Demand:
    """What is left to ask when kube-scheduler has seen to everything else."""
    shape = replace(
        demand.shape,
        amounts=tuple((name, asked) for name, asked in demand.shape.amounts if name in and_amounts),
        rules="",
        node_selector={},
        node_affinity={},
        tolerations=({"operator": "Exists"},),
    )
    return replace(
        demand,
        shape=shape,
        neighbours=NONE,
        host_ports=frozenset(),
        claims=(),
        owned_claims=frozenset(),
        unsupported=None,
    )


def _points(figures: "np.ndarray[Any, np.dtype[np.float64]]") -> list[int]:
    """BEST_SCORE for the first of the best alone, so that equal nodes are always decided alike."""
    known = figures > -np.inf
    if not known.any():
        return [0] * len(figures)
    low, high = figures[known].min(), figures[known].max()
    span = (high - low) or 1.0
    points = np.where(known, np.floor((BEST_SCORE - 1) * (np.where(known, figures, low) - low) / span), 0)
    points[int(figures.argmax())] = BEST_SCORE
    return [int(point) for point in points]


class _Metadata(msgspec.Struct):
    name: str
    uid: str | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: dict[str, Any]


class _WithPod(msgspec.Struct):
    pod: _Pod = msgspec.field(name="Pod")


class _WithNodes(msgspec.Struct):
    names: tuple[str, ...] = msgspec.field(name="NodeNames")


class _Binding(msgspec.Struct):
    namespace: str = msgspec.field(name="PodNamespace")
    name: str = msgspec.field(name="PodName")
    uid: PodUid = msgspec.field(name="PodUID")
    node: NodeName = msgspec.field(name="Node")


def _pod_of(args: Any) -> JsonObject:
    """The pod, if it is one. Raises InvalidValue."""
    wire.convert(args, _WithPod, what=_BODY)
    pod: JsonObject = args["Pod"]
    return pod


def _node_names(args: Any) -> tuple[str, ...]:
    """Raises InvalidValue. Each is looked up and answered for while no watch event is handled."""
    names = wire.convert(args, _WithNodes, what=_BODY).names
    if len(names) > _MOST_NAMES:
        raise InvalidValue(f"{_BODY}.NodeNames has {len(names)} names; {_MOST_NAMES} at most are answered")
    return names


async def _arguments(request: web.Request) -> Any:
    """The body's JSON. Raises InvalidValue."""
    data = await request.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{_BODY} is not UTF-8: {error}") from error
    return wire.parse(text, what=_BODY, limit=_BODY_BYTES)
