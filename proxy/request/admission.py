"""Who may have Triton work for it, and when: so many requests and so many bytes at once, the rest in order.

REST and gRPC share one of these for each replica of a model. What is given back goes to the one that has waited
longest, in the same step, so none overtakes. The limit is hard: a request that Triton works on keeps its
slot until Triton is done with it, with or without a client. A slot is for that alone: who sends a
long request, or takes a long answer, keeps Triton's memory and no slot meanwhile. Modelled on Knative's
pkg/queue/breaker.go, which is not strictly FIFO.
"""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from berth.contract.quantity import format_bytes
from proxy.policy.refusal import Refusal, Why
from proxy.request.budget import Budget
from proxy.request.load import LoadMeter
from proxy.request.outstanding import Outstanding, Share

QUEUE_FULL: Final = "pending request queue full"
# Requests that Triton still has to run without a client: where there is no limit, those who give
# up and ask again must not pile up work for ever.
MOST_GIVEN_UP: Final = 256
# A request without a client keeps its slot: Triton goes on with it. One that is not done by then never will be.
GIVEN_UP_SECONDS: Final = 3600.0
# Answers up to here are taken from Triton at once, however slow their reader.
LARGE_ANSWER_BYTES: Final = 64 * 1024


class AdmissionState(Enum):
    """Of an admission."""

    WAITING = auto()
    RUNNING = auto()
    GIVEN_UP = auto()  # its client has gone, and Triton works on it all the same
    ASIDE = auto()  # Triton has bytes of it and nothing to compute: half a request, or an answer to be taken
    LEAVING = auto()  # its client has gone; the rest of its answer is read and dropped
    RETURNING = auto()  # the request is whole now but for a last bit, which waits for the slot
    RELEASED = auto()


_WAITING, _RUNNING, _GIVEN_UP, _ASIDE, _LEAVING, _RETURNING, _RELEASED = AdmissionState


class Admission:
    """One request's claim on Triton, from its arrival until Triton has nothing of it left.

    However often and in whatever order `give_up` and `release` are called, slot, place, bytes and meter are
    given back once.
    """

    __slots__ = ("_granted", "_home", "cost_bytes", "deadline", "share", "state")

    def __init__(
        self,
        home: "Admissions",
        state: AdmissionState,
        cost_bytes: int,
        deadline: float,
        granted: Callable[[], None],
        share: Share | None,
    ) -> None:
        """`share`: what it takes one of beside its slot; None: nothing."""
        self._home, self._granted, self.share = home, granted, share
        self.state, self.cost_bytes, self.deadline = state, cost_bytes, deadline

    @property
    def is_waiting(self) -> bool:
        return self.state is _WAITING

    def is_overdue(self, now: float) -> bool:
        """It has waited for longer than it may."""
        return self.state is _WAITING and now > self.deadline

    @property
    def is_running(self) -> bool:
        """All of it may be sent to Triton: it has its slot, and a client."""
        return self.state is _RUNNING

    @property
    def keeps_others_waiting(self) -> bool:
        """For its slot, or for the bytes that Triton has of it."""
        if self.state is _RUNNING:
            return self._home.waiting > 0
        return self.state is _ASIDE and self._home.others_wait_for_room

    def step_aside(self) -> None:
        """The rest of it is still to come: until `come_back` Triton has nothing to compute, and it needs no slot."""
        self.has_run(0)

    def come_back(self, granted: Callable[[], None]) -> bool:
        """The rest of it is here. True: it has a slot again. False: `granted` tells, before any that has not begun."""
        if self.state is _ASIDE:
            self._granted = granted
            if self._home.came_back(self):
                self.state = _RUNNING
            else:
                self.state = _RETURNING
        return self.state is _RUNNING

    def grant(self) -> None:
        """Admissions' word: its turn has come."""
        self.state = _RUNNING
        self._granted()

    def give_up(self, now: float) -> None:
        """Its client has gone. What waits is released; what Triton has keeps all until `release`."""
        if self.state is _RUNNING:
            self.state = _GIVEN_UP
            self._home.given_up += 1
        elif self.state is _ASIDE:
            self.state = _LEAVING
            self._home.leaving_bytes += self.cost_bytes
        elif self.state is _RETURNING:
            self.state = _ASIDE
            self._home.stays_away(self)
        elif self.state is _WAITING:
            self.release(now)

    def release(self, now: float) -> None:
        """Triton has nothing of it, or never will have."""
        state = self.state
        if state is _RELEASED:
            return
        self.state = _RELEASED
        self._home.released(self, state, now)

    def grow(self, more_bytes: int) -> None:
        """It costs so much more than was said. Raises Refusal where there is no room for that."""
        if self.state in (_RUNNING, _ASIDE):
            self._home.require_room(self.cost_bytes, more_bytes)
            self.cost_bytes += more_bytes
            self._home.bytes.charge(more_bytes)

    def has_run(self, answer_bytes: int) -> None:
        """Triton begins to tell an answer of so many bytes, and keeps it until it has been taken.

        Who takes it slowly does so without the slot, which is for what Triton computes, but not without the bytes.
        """
        if self.state is _RUNNING:
            self.state = _ASIDE
            self.cost_bytes += answer_bytes
            self._home.has_run(self, answer_bytes)


def _unobserved() -> None:
    """Called with a slot that was free at once."""


class Admissions:
    """All admissions of one kind to one replica. `limit` 0: as many at once as their bytes allow."""

    def __init__(
        self,
        meter: LoadMeter,
        *,
        limit: int,
        queue_depth: int,
        bytes: Budget,
        bytes_flag: str = "",
        outstanding: Outstanding | None = None,
    ) -> None:
        """`bytes`: of what runs, together, and no part of another; what a request costs is its caller's to say.

        `bytes_flag`: which option sets that limit, for those that are refused.
        `outstanding`: what REST requests of all replicas share; None: they are not counted.
        """
        self._share = None if outstanding is None else Share(outstanding, self.hand_out)
        self._meter, self._limit, self._depth = meter, limit, queue_depth
        self.bytes, self._bytes_flag = bytes, bytes_flag
        self._waiting: OrderedDict[Admission, None] = OrderedDict()
        # REST requests that came before all of those and lack a turn among the replicas; gRPC does not wait for them.
        self._out_of_turn: OrderedDict[Admission, None] = OrderedDict()
        # Those that have begun, and need a slot again: before all others.
        self._returning: OrderedDict[Admission, None] = OrderedDict()
        # Only while a request waits for an empty pod.
        self._idle: asyncio.Event | None = None
        # Those without a client run as well.
        self.running = self.given_up = 0
        # Those that have bytes and no slot; the bytes of those of them that are free in a moment.
        self._aside = self.leaving_bytes = 0
        self._hands_out = False
        # Why none is admitted for now, in words for clients.
        self.closed: str | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._out_of_turn) + len(self._returning)

    @property
    def others_wait_for_room(self) -> bool:
        """For the bytes of those that are in Triton and stay."""
        more = self.leaving_bytes
        return not (self._has_room(self._out_of_turn, more) and self._has_room(self._waiting, more))

    def _has_room(self, queue: OrderedDict[Admission, None], more_bytes: int = 0) -> bool:
        """Whether there are bytes for the first one, were there so many more."""
        return not queue or next(iter(queue)).cost_bytes <= self.bytes.free_bytes + more_bytes

    def admit(
        self,
        now: float,
        granted: Callable[[], None],
        *,
        cost_bytes: int = 0,
        deadline: float = float("inf"),
        is_rest: bool = False,
    ) -> Admission:
        """It runs already, or it waits until `granted` is called, which must not raise. Raises Refusal.

        Waiting counts as concurrency, being refused as an arrival. `now`: on the meter's clock.
        """
        self._require_possible(cost_bytes)
        if self.closed is not None:
            self._refuse(Why.NOT_SERVED, self.closed)
        admission = self.admit_at_once(now, cost_bytes=cost_bytes, deadline=deadline, is_rest=is_rest)
        if admission is not None:
            return admission
        if self.given_up >= MOST_GIVEN_UP:
            self._refuse(Why.QUEUE_FULL, f"{MOST_GIVEN_UP} requests without a client still run in Triton")
        if not self._take_place():
            self._refuse_for_want_of_room(cost_bytes)
        share = self._share if is_rest else None
        admission = Admission(self, _WAITING, cost_bytes, deadline, granted, share)
        self._waiting[admission] = None
        self._set_out_of_turn_aside()
        self._meter.enter(now)
        self._watch(True)
        return admission

    def admit_at_once(
        self, now: float, *, cost_bytes: int = 0, deadline: float = float("inf"), is_rest: bool = False
    ) -> Admission | None:
        """An admission that runs, if there is room and none waits for it."""
        if self._waiting or self._returning or self.given_up >= MOST_GIVEN_UP or self.closed is not None:
            return None
        room, share = self.bytes, self._share if is_rest else None
        used = room.used_bytes + cost_bytes
        if used > room.limit_bytes:
            return None
        if share is not None and (self._out_of_turn or not share.take()):
            return None
        if not self._take():
            if share is not None:
                share.give()
            return None
        room.used_bytes = used
        self.running += 1
        self._meter.enter(now)
        return Admission(self, _RUNNING, cost_bytes, deadline, _unobserved, share)

    def released(self, admission: Admission, was: AdmissionState, now: float) -> None:
        """For an admission alone."""
        self._meter.leave(now)
        if was is _RUNNING:
            self.bytes.used_bytes -= admission.cost_bytes
            self.running -= 1
            self._give()
            if admission.share is not None:
                admission.share.give()
        elif was is _WAITING:
            del (self._out_of_turn if admission in self._out_of_turn else self._waiting)[admission]
            self._give_place()
        else:
            self._released_late(admission, was)
        if self._waiting or self._out_of_turn or self._returning:
            self.hand_out()
            return
        if was is _WAITING or was is _RETURNING:
            self._watch(False)
        if self._idle is not None:
            self._look_idle()

    def _released_late(self, admission: Admission, was: AdmissionState) -> None:
        """It had no client any more, or no slot."""
        self.bytes.used_bytes -= admission.cost_bytes
        if was is _GIVEN_UP:
            self.given_up -= 1
            self._stops_running(admission)
            return
        if was is _RETURNING:
            self.stays_away(admission)
        elif was is _LEAVING:
            self.leaving_bytes -= admission.cost_bytes
        self._aside -= 1

    def has_run(self, admission: Admission, answer_bytes: int) -> None:
        """For an admission alone."""
        self._aside += 1
        self.bytes.charge(answer_bytes)
        self._stops_running(admission)
        if self._anybody_waits:
            self.hand_out()

    def _stops_running(self, admission: Admission) -> None:
        self.running -= 1
        self._give()
        if admission.share is not None:
            admission.share.give()

    @property
    def _anybody_waits(self) -> bool:
        return bool(self._waiting or self._out_of_turn or self._returning)

    def came_back(self, admission: Admission) -> bool:
        """For an admission alone: whether there is a slot for it; else it waits."""
        if not self._returning and self._has_turn(admission) and self._take():
            self._runs_again(admission)
            return True
        self._returning[admission] = None
        self._watch(True)
        return False

    def _runs_again(self, admission: Admission) -> None:
        if admission.share is not None:
            admission.share.take()
        self._aside -= 1
        self.running += 1

    @staticmethod
    def _has_turn(admission: Admission) -> bool:
        """Whether it may run, as far as other replicas are concerned; if not, it hears of its turn."""
        share = admission.share
        if share is None or share.has_room:
            return True
        share.wait()
        return False

    def stays_away(self, admission: Admission) -> None:
        """For an admission alone."""
        del self._returning[admission]

    def resize(self, *, limit: int, queue_depth: int) -> None:
        """Other limits from now on; what runs and what waits already stays."""
        self._limit, self._depth = limit, queue_depth
        self.hand_out()

    def hand_out(self) -> None:
        """Give what is free to those who wait, in their order."""
        if self._hands_out:  # one that gives back at once what it was given: the loop below sees it
            return
        self._hands_out = True
        while (admission := self._next()) is not None:
            admission.grant()
        self._hands_out = False
        self._watch(self._anybody_waits)
        self._look_idle()

    def _next(self) -> Admission | None:
        """The next that has all it needs by now."""
        if self._returning and self._has_turn(next(iter(self._returning))):
            if not self._take():
                return None
            admission, _ = self._returning.popitem(last=False)
            self._runs_again(admission)
            return admission
        if self.given_up >= MOST_GIVEN_UP:
            return None
        self._set_out_of_turn_aside()
        queue = self._out_of_turn
        if not queue or not self._has_turn(next(iter(queue))):
            queue = self._waiting
        if not queue:
            return None
        admission = next(iter(queue))
        if not self._take_all(admission):
            return None
        del queue[admission]
        self._give_place()
        return admission

    def _set_out_of_turn_aside(self) -> None:
        """What is first and lacks nothing but its turn keeps no gRPC call waiting; it goes on before all that came later."""
        waiting, aside = self._waiting, self._out_of_turn
        while waiting:
            first = next(iter(waiting))
            if first.share is None or (not aside and self._has_turn(first)):
                return
            del waiting[first]
            aside[first] = None

    def close(self) -> None:
        """None is admitted any more; what runs may still give back."""

    async def idle(self) -> None:
        """Return when nothing runs, waits or is still to be taken. For one caller at a time."""
        while not self._is_idle:
            self._idle = asyncio.Event()
            await self._idle.wait()
        self._idle = None

    @property
    def _is_idle(self) -> bool:
        return not (self.running or self._aside or self._anybody_waits)

    def _require_possible(self, cost_bytes: int) -> None:
        if cost_bytes > self.bytes.limit_bytes:
            self._refuse(
                Why.TOO_LARGE,
                f"the request would take {format_bytes(cost_bytes)} of memory, and all requests together "
                f"may take {format_bytes(self.bytes.limit_bytes)}{self._flag_hint()}",
            )

    def require_room(self, had_bytes: int, more_bytes: int) -> None:
        """For an admission alone. Raises Refusal."""
        self._require_possible(had_bytes + more_bytes)
        if more_bytes > self.bytes.free_bytes:
            self._refuse_for_want_of_room(more_bytes)

    def _refuse_for_want_of_room(self, cost_bytes: int) -> None:
        if cost_bytes > self.bytes.free_bytes:
            self._refuse(
                Why.NO_ROOM,
                f"requests that are under way take {format_bytes(self.bytes.used_bytes)} of the "
                f"{format_bytes(self.bytes.limit_bytes)} that they may take together{self._flag_hint()}",
            )
        self._refuse(Why.QUEUE_FULL, QUEUE_FULL)

    def _flag_hint(self) -> str:
        return f" ({self._bytes_flag})" if self._bytes_flag else ""

    def _refuse(self, why: Why, message: str) -> None:
        self._meter.refused()
        raise Refusal(why, message)

    def _take_all(self, admission: Admission) -> bool:
        """Of one whose turn it is."""
        used = self.bytes.used_bytes + admission.cost_bytes
        if used > self.bytes.limit_bytes or not self._take():
            return False
        if admission.share is not None:
            admission.share.take()
        self.bytes.used_bytes = used
        self.running += 1
        return True

    def _take(self) -> bool:
        return not self._limit or self.running < self._limit

    def _give(self) -> None:
        """`running` has notified already."""

    def _take_place(self) -> bool:
        return len(self._waiting) + len(self._out_of_turn) < self._depth

    def _give_place(self) -> None:
        """The length of the queue has notified already."""

    def _watch(self, waiting: bool) -> None:
        """Whether anybody waits for what another process may give."""

    def _look_idle(self) -> None:
        if self._idle is not None and self._is_idle:
            self._idle.set()

    @property
    def _lacks_a_slot(self) -> bool:
        """Whether a request waits for a slot and for nothing else."""
        if self._returning and self._has_turn(next(iter(self._returning))):
            return True
        if self.given_up >= MOST_GIVEN_UP:
            return False
        if self._out_of_turn and self._has_turn(next(iter(self._out_of_turn))):
            return self._has_room(self._out_of_turn)
        return bool(self._waiting) and self._has_room(self._waiting)


class SharedAdmissions(Admissions):
    """One process' part of a limit that several share: two counters in the kernel (eventfd(2), EFD_SEMAPHORE).

    Among the requests of one process none overtakes; between processes the kernel's order decides.
    """

    def __init__(
        self,
        meter: LoadMeter,
        slots: int,
        places: int,
        *,
        bytes: Budget,
        bytes_flag: str = "",
        outstanding: Outstanding | None = None,
    ) -> None:
        """Descriptors of the free slots and of the free places in the queue, as `shared_limit` makes them."""
        super().__init__(
            meter, limit=0, queue_depth=0, bytes=bytes, bytes_flag=bytes_flag, outstanding=outstanding
        )
        self._slots, self._places = slots, places
        self._watching = self._is_over = False

    def resize(self, *, limit: int, queue_depth: int) -> None:
        """The process that made the counters changes them, for all processes."""

    def close(self) -> None:
        """The descriptors end with it: the process that made them handles what is not given back."""
        if not self._is_over:
            self._is_over, self.closed = True, "the model has ended"
            if self._watching:
                asyncio.get_running_loop().remove_reader(self._slots)
            self._watching = False
            os.close(self._slots)
            os.close(self._places)

    def _take(self) -> bool:
        return not self._is_over and _decrement(self._slots)

    def _give(self) -> None:
        if not self._is_over:
            os.eventfd_write(self._slots, 1)

    def _take_place(self) -> bool:
        return _decrement(self._places)

    def _give_place(self) -> None:
        if not self._is_over:
            os.eventfd_write(self._places, 1)

    def _watch(self, waiting: bool) -> None:
        # A slot that is free is no news to one that waits for bytes or for its turn: what gives those back hands out.
        waits = waiting and not self._is_over and self._lacks_a_slot
        if waits and not self._watching:
            asyncio.get_running_loop().add_reader(self._slots, self.hand_out)
        elif self._watching and not waits:
            asyncio.get_running_loop().remove_reader(self._slots)
        self._watching = waits


def shared_limit(limit: int, queue_depth: int) -> tuple[int, int]:
    """Descriptors to give to every process."""
    flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
    return os.eventfd(limit, flags), os.eventfd(queue_depth, flags)


def _decrement(descriptor: int) -> bool:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return False
    return True
