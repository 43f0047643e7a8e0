"""One pod's model as the data plane serves it: all that is one replica's, and nothing that is a process'.

A process has one of these (a proxy for one model) or hundreds, so each is small.
"""

import asyncio
import time
from collections.abc import Callable

from berth.contract.gateway import ReplicaLimits
from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.policy.refusal import Flags
from proxy.request.admission import Admissions, SharedAdmissions
from proxy.request.budget import Budget
from proxy.request.load import LoadMeter, LoadReport
from proxy.request.outstanding import Outstanding
from proxy.request.traffic import Figures, Traffic

# Questions that take no slot (metadata, configuration, statistics, readiness): so many are with Triton at once,
# for a replica, and so many more wait. Each is a connection, and a thread of Triton's for a moment.
_QUESTIONS, _QUESTIONS_WAITING = 8, 512
_QUESTION_BYTES = 64 * 1024**2
# Where requests have no limit, their bytes have: more clients than a model has send large ones at once.
_WAITING_FOR_ROOM = 1000


class Replica:
    """`names` hold for as long as it lives; everything else may change."""

    def __init__(
        self,
        names: Names,
        limits: ReplicaLimits,
        *,
        process_budget: Budget | None = None,
        outstanding: Outstanding | None = None,
        shared: tuple[int, int] | None = None,
        admissions: Callable[[LoadMeter], Admissions] | None = None,
        flags_of: Callable[[ReplicaLimits], Flags] = lambda limits: Flags(),
    ) -> None:
        """`process_budget`: what all replicas of the process may hold together of bodies that are coming.

        `outstanding`: what REST requests of all replicas of the process share.
        `shared`: the limit is one with other processes' (`admission.shared_limit`).
        `admissions`: makes what admits where it is not these limits that do.
        `flags_of`: which options set such limits.
        """
        self.names, self.limits = names, limits
        self._flags_of, self.flags = flags_of, flags_of(limits)
        self.facts = ModelFacts()
        self.rest, self.grpc = Traffic(), Traffic()
        # Since the start, whatever was said to them.
        self.calls = 0
        now = time.monotonic()
        self._meter = LoadMeter(now, time.time)
        self.load = LoadReport(0.0, 0.0, 0.0, time.time())
        # Of requests that have come and not gone on to Triton.
        self.budget = Budget(limits.max_inflight_bytes, process_budget)
        in_triton = Budget(limits.max_inflight_bytes)
        if admissions is not None:
            self.admissions = admissions(self._meter)
        elif shared is not None:
            self.admissions = SharedAdmissions(
                self._meter,
                *shared,
                bytes=in_triton,
                bytes_flag=self.flags.inflight,
                outstanding=outstanding,
            )
        else:
            self.admissions = Admissions(
                self._meter,
                limit=limits.container_concurrency,
                queue_depth=queue_depth(limits),
                bytes=in_triton,
                bytes_flag=self.flags.inflight,
                outstanding=outstanding,
            )
        # Of what takes no slot and is no load: this meter is not read.
        self.questions = Admissions(
            LoadMeter(now, time.time),
            limit=_QUESTIONS,
            queue_depth=_QUESTIONS_WAITING,
            bytes=Budget(_QUESTION_BYTES),
        )
        self._withheld: str | None = None
        self.draining = False
        self._triton_says: str | None = "the model has not been requested yet"
        self._changed = asyncio.Event()

    def rejected(self) -> None:
        """A request was, before it could ask to be admitted, because too many are here."""
        self._meter.refused()

    def is_too_large(self, size_bytes: int) -> bool:
        """Whether no request may have so many bytes."""
        return size_bytes > self.limits.max_request_bytes

    def set_limits(self, limits: ReplicaLimits) -> None:
        """For whatever comes from now on; what is under way or waits already is not touched."""
        self.limits, self.flags = limits, self._flags_of(limits)
        self.budget.limit_bytes = self.admissions.bytes.limit_bytes = limits.max_inflight_bytes
        self.admissions.resize(limit=limits.container_concurrency, queue_depth=queue_depth(limits))

    def not_ready(self) -> str | None:
        """Why no request should come, or None."""
        if self.draining:
            return "draining"
        return self.admissions.closed or self._withheld or self._triton_says

    @property
    def withheld(self) -> str | None:
        """Why it is not to be used whatever Triton says, in the agent's words."""
        return self._withheld

    @withheld.setter
    def withheld(self, reason: str | None) -> None:
        if reason != self._withheld:
            self._withheld = reason
            self.announce()

    @property
    def closed(self) -> str | None:
        """Why no request of it goes to Triton for now, in the gateway's own words."""
        return self.admissions.closed

    @closed.setter
    def closed(self, reason: str | None) -> None:
        if reason != self.admissions.closed:
            self.admissions.closed = reason
            self.announce()

    @property
    def not_served(self) -> str | None:
        """Why Triton does not serve it, be it to be used or not."""
        return self._triton_says

    @property
    def is_served(self) -> bool:
        return self._triton_says is None

    def triton_says(self, reason: str | None) -> bool:
        """Whether Triton serves it, as it was asked last; True if that is news."""
        news = (reason is None) != (self._triton_says is None)
        self._triton_says = reason
        if news:
            self.announce()
        return news

    def drain(self) -> None:
        """Not ready from now on; what is under way goes on."""
        self.draining = True
        self.announce()

    def serve_again(self) -> None:
        """It was not to end after all."""
        self.draining = False
        self.announce()

    def next_change(self) -> asyncio.Event:
        """Set when readiness changes. Take it before looking."""
        return self._changed

    def announce(self) -> None:
        """Wake who waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def sent_bytes(self) -> int:
        """Of answers, since the start."""
        return self.rest.sent_bytes + self.grpc.sent_bytes

    def tick(self, now: float) -> None:
        """Every second: close one period of the meter."""
        self.load = self._meter.report(now)
        self.admissions.hand_out()  # where processes share the limit, more room for bytes notifies none of them

    async def idle(self) -> None:
        """Return when nothing of it runs in Triton and nothing waits."""
        await self.admissions.idle()

    def figures(self) -> Figures:
        """Of this process; `busy_connections` is for the downstreams to tell."""
        return Figures(
            rest=self.rest,
            grpc=self.grpc,
            running=self.admissions.running,
            waiting=self.admissions.waiting,
            average_concurrency=self.load.average_concurrency,
            requests_per_second=self.load.requests,
            model_ready=self.is_served,
        )


def queue_depth(limits: ReplicaLimits) -> int:
    if limits.queue_depth is not None:
        return limits.queue_depth
    return 10 * limits.container_concurrency or _WAITING_FOR_ROOM
