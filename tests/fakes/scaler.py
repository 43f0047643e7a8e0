"""The scaler's end of the control streams, with a handler that assigns what a test says and an authenticator that believes
every token."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from berth.contract.activation import Assignment, Report, RouteMode
from berth.contract.endpoint import Endpoint
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.contract.scaling import ModelKey
from scaler.activation.activators import Activator, Activators
from scaler.activation.authentication import ActivatorIdentity
from scaler.activation.control_server import ControlServer, NotLeading, serving
from scaler.activation.ports import PortPair
from scaler.activation.sessions import Sessions

MODEL, OTHER = ModelKey("a", "m"), ModelKey("b", "n")
PAIR = PortPair(20000, 20001)
HERE = "127.0.0.1"


def assignment(model: ModelKey = MODEL, **more: Any) -> Assignment:
    fields: dict[str, Any] = {
        "version": 0,
        "model": model,
        "public_name": model.name,
        "mode": RouteMode.PROXY,
        "rest_port": PAIR.rest,
        "grpc_port": PAIR.grpc,
        "clients": frozenset({model.namespace}),
    }
    return Assignment(**fields | more)


@dataclass
class Core:
    """Assigns every activator what stands in `wanted`; notes what it gets."""

    leads: bool = True
    leader: str = ""
    wanted: dict[ModelKey, Assignment] = field(default_factory=dict)
    reports: list[tuple[str, Report]] = field(default_factory=list)
    news: list[ModelKey] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def require_leading(self) -> None:
        if not self.leads:
            raise NotLeading(self.leader)

    def connected(self, activator: Activator) -> None:
        self.assign_all()

    def disconnected(self, activator: Activator) -> None:
        self.ended.append(activator.uid)

    def ports_changed(self, model: ModelKey) -> None:
        self.news.append(model)

    def reported(self, activator: Activator, report: Report) -> None:
        self.reports.append((activator.uid, report))

    def assign_all(self) -> None:
        for model in self.wanted:
            self.assign(model)

    def assign(self, model: ModelKey) -> None:
        wanted = self.wanted.get(model)
        assignments = {} if wanted is None else {one.uid: wanted for one in self.scaler.activators}
        self.scaler.sessions.assign(model, assignments)

    scaler: "Scaler" = field(init=False)


class Everybody:
    """The token is the pod: "namespace/name", or a refusal."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.addresses = frozenset({HERE, "10.0.0.1"})
        self.asked: list[str] = []

    async def authenticate(self, metadata: Mapping[str, str], source: str) -> ActivatorIdentity:
        token = metadata.get("authorization", "").removeprefix("Bearer ")
        self.asked.append(token)
        if self.refusal is not None:
            raise self.refusal
        namespace, _, name = token.partition("/")
        scope = None if namespace == "berth-system" else namespace
        return ActivatorIdentity(PodRef(namespace, name, PodUid(token)), self.addresses, scope)


class Scaler:
    """One replica, which may come and go at its port."""

    def __init__(self, core: Core) -> None:
        self.core, self.authenticator = core, Everybody()
        core.scaler = self
        self.port = 0
        self.anew()

    def anew(self) -> None:
        """Another process: nothing of the last one is known."""
        self.activators = Activators(began_ns=time.time_ns())
        self.sessions = Sessions(self.activators, time.time_ns)
        self.control_server = ControlServer(self.core, self.authenticator, self.activators, self.sessions)

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Scaler"]:
        async with serving(self.control_server, Endpoint(HERE, self.port)) as self.port:
            yield self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(HERE, self.port)


@asynccontextmanager
async def scaler(**core: Any) -> AsyncIterator[Scaler]:
    async with Scaler(Core(**core)).up() as one:
        yield one
