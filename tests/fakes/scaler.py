"""The scaler's end of the activators' stream, with a core that says what it is told to and callers that are believed."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from berth.contract.endpoint import Endpoint
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.contract.scaling import Assignment, HoldState, ModelKey, Report
from scaler.activation.activators import Activator, Activators
from scaler.activation.attend import Attendance, NotLeading, serving
from scaler.activation.callers import Caller
from scaler.activation.ports import PortPair
from scaler.activation.sources import Sources

MODEL, OTHER = ModelKey("a", "m"), ModelKey("b", "n")
PAIR = PortPair(20000, 20001)
HERE = "127.0.0.1"


def assignment(model: ModelKey = MODEL, **more: Any) -> Assignment:
    said: dict[str, Any] = {
        "version": 0,
        "model": model,
        "public_name": model.name,
        "state": HoldState.HOLD,
        "rest_port": PAIR.rest,
        "grpc_port": PAIR.grpc,
        "clients": frozenset({model.namespace}),
    }
    return Assignment(**said | more)


@dataclass
class Core:
    """Tells every activator what stands in `wanted`; notes what it hears."""

    leads: bool = True
    leader: str = ""
    wanted: dict[ModelKey, Assignment] = field(default_factory=dict)
    reports: list[tuple[str, Report]] = field(default_factory=list)
    news: list[ModelKey] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def require_leading(self) -> None:
        if not self.leads:
            raise NotLeading(self.leader)

    def attached(self, activator: Activator) -> None:
        self.tell_all()

    def detached(self, activator: Activator) -> None:
        self.ended.append(activator.uid)

    def opened(self, model: ModelKey) -> None:
        self.news.append(model)

    def reported(self, activator: Activator, report: Report) -> None:
        self.reports.append((activator.uid, report))

    def tell_all(self) -> None:
        for model in self.wanted:
            self.tell(model)

    def tell(self, model: ModelKey) -> None:
        told = self.wanted.get(model)
        everybody = {} if told is None else {one.uid: told for one in self.scaler.activators}
        self.scaler.attendance.tell(model, everybody)

    scaler: "Scaler" = field(init=False)


class Everybody:
    """The token is the pod: "namespace/name", or a refusal."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.addresses = frozenset({HERE, "10.0.0.1"})
        self.asked: list[str] = []

    async def caller(self, metadata: Mapping[str, str], source: str) -> Caller:
        token = metadata.get("authorization", "").removeprefix("Bearer ")
        self.asked.append(token)
        if self.refusal is not None:
            raise self.refusal
        namespace, _, name = token.partition("/")
        scope = None if namespace == "berth-system" else namespace
        return Caller(PodRef(namespace, name, PodUid(token)), self.addresses, scope)


class Scaler:
    """One replica, which may come and go at its port."""

    def __init__(self, core: Core) -> None:
        self.core, self.callers, self.sources = core, Everybody(), Sources()
        core.scaler = self
        self.port = 0
        self.anew()

    def anew(self) -> None:
        """Another process: nothing of the last one is known."""
        self.activators = Activators(began_ns=time.time_ns())
        self.attendance = Attendance(self.core, self.callers, self.activators, self.sources)

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Scaler"]:
        async with serving(self.attendance, Endpoint(HERE, self.port)) as self.port:
            yield self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(HERE, self.port)


@asynccontextmanager
async def scaler(**core: Any) -> AsyncIterator[Scaler]:
    async with Scaler(Core(**core)).up() as one:
        yield one
