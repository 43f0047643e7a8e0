"""One model's life in Triton: its phases, what may happen, and what is to be done then. Pure.

The whole of it is `TABLE`. A phase says what Triton may hold and who waits for what. Every event has an entry in
every phase, so that no order of events, no late answer and no crash is a special case.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Phase(str, Enum):
    UNLOADED = "unloaded"  # as far as is known Triton does not hold it, and no caller waits for it
    REPORTING = "reporting"  # to be loaded, once the node's report lists it
    QUEUED = "queued"  # to be loaded, in its turn
    LOADING = "loading"  # a call of this agent is under way
    CHANGING = "changing"  # Triton loads or unloads it, or may, and no call of this agent returns the outcome
    LATE = "late"  # as CHANGING, for longer than a load may take: reported as failed
    SERVING = "serving"
    FAILING = "failing"  # refused or wrong; what Triton may hold of it is being taken away
    CANCELLED = "cancelled"  # LOADING, and not wanted any more
    UNLOAD_PENDING = "unload pending"  # not wanted; Triton may hold it
    UNLOADING = "unloading"  # not wanted; Triton has been asked to unload it
    STUCK = "stuck"  # not wanted, and Triton has not released it in time

    @property
    def may_be_held(self) -> bool:
        """Triton may have memory of it."""
        return self not in (Phase.UNLOADED, Phase.REPORTING, Phase.QUEUED)

    @property
    def is_under_way(self) -> bool:
        """Triton may work on it: its memory is changing, or may be."""
        return self.may_be_held and self is not Phase.SERVING

    @property
    def hangs(self) -> bool:
        """Triton has worked on it for longer than it may: no other model waits for its end any more."""
        return self in (Phase.LATE, Phase.STUCK)

    @property
    def awaits_sight(self) -> bool:
        """It goes on by what Triton's index will say of it."""
        return self in (Phase.QUEUED, Phase.CHANGING, Phase.FAILING, Phase.UNLOAD_PENDING, Phase.UNLOADING)

    @property
    def is_load(self) -> bool:
        """The caller of the load still waits."""
        return self in (Phase.REPORTING, Phase.QUEUED, Phase.LOADING, Phase.CHANGING, Phase.FAILING)


class Event(str, Enum):
    # What is wanted.
    REQUESTED = "requested"  # load it
    REPORTED = "reported"  # the report lists it
    TURN = "turn"  # its turn to be loaded has come
    DENIED = "denied"  # it is not to be loaded
    DROPPED = "dropped"  # take it out of Triton
    # How a call of ours has ended.
    LOADED = "loaded"
    REFUSED = "refused"  # Triton says why not; or it serves in a wrong way
    TIMED_OUT = "timed out"  # Triton goes on with it
    CUT_OFF = "cut off"  # Triton has gone away, or its answer was lost
    UNLOAD_FAILED = "unload failed"  # the call failed
    # What Triton's index says.
    SEEN_SERVED = "seen served"
    SEEN_CHANGING = "seen changing"  # being loaded or unloaded
    SEEN_ENDED = "seen ended"  # not loaded any more, and this Triton remembers it
    SEEN_UNKNOWN = "seen unknown"  # this Triton has never had it
    # It has been in its phase for longer than it may.
    OVERDUE = "overdue"


class Do(str, Enum):
    """What the caller has to do after a transition."""

    REPORT = "report"  # wait until the report lists it, then REPORTED
    LOAD = "load"  # call Triton
    UNLOAD = "unload"  # call Triton
    NOTE_SERVED = "note served"  # it serves
    NOTE_LATE = "note late"  # its load has taken too long
    NOTE_FAILED = "note failed"  # its load has failed
    NOTE_UNLOADED = "note unloaded"  # Triton does not hold it
    GIVE_UP = "give up"  # the load's callers need not wait any more
    CLEAR = "clear"  # whatever became of its load, Triton has survived it
    BLAME = "blame"  # Triton has restarted: the loads that were open then are suspect


_E, _P = Event, Phase
Entry = tuple[Phase, tuple[Do, ...]]
_GONE, _FORGOTTEN = (Do.CLEAR, Do.NOTE_UNLOADED), (Do.BLAME, Do.NOTE_UNLOADED)

# What is not listed changes nothing.
_TRANSITIONS: dict[Phase, dict[Event, Entry]] = {
    _P.UNLOADED: {
        _E.REQUESTED: (_P.REPORTING, (Do.REPORT,)),
        _E.DROPPED: (_P.UNLOAD_PENDING, ()),
    },
    _P.REPORTING: {
        _E.REPORTED: (_P.QUEUED, ()),
        _E.DENIED: (_P.UNLOADED, (Do.GIVE_UP,)),
        _E.DROPPED: (_P.UNLOAD_PENDING, (Do.GIVE_UP,)),
    },
    _P.QUEUED: {
        _E.TURN: (_P.LOADING, (Do.LOAD,)),
        _E.DENIED: (_P.UNLOADED, (Do.GIVE_UP,)),
        _E.DROPPED: (_P.UNLOAD_PENDING, (Do.GIVE_UP,)),
        # An earlier agent, or a load whose answer was lost, has done it or is at it.
        _E.SEEN_SERVED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.SEEN_CHANGING: (_P.CHANGING, ()),
    },
    _P.LOADING: {
        _E.LOADED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.REFUSED: (_P.FAILING, (Do.CLEAR,)),
        _E.TIMED_OUT: (_P.LATE, (Do.NOTE_LATE,)),
        _E.CUT_OFF: (_P.CHANGING, ()),
        _E.DROPPED: (_P.CANCELLED, (Do.GIVE_UP,)),
    },
    _P.CHANGING: {
        _E.SEEN_SERVED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.SEEN_ENDED: (_P.QUEUED, _GONE),
        _E.SEEN_UNKNOWN: (_P.QUEUED, _FORGOTTEN),
        _E.OVERDUE: (_P.LATE, (Do.NOTE_LATE,)),
        _E.DROPPED: (_P.UNLOAD_PENDING, (Do.GIVE_UP,)),
    },
    _P.LATE: {
        _E.SEEN_SERVED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.SEEN_ENDED: (_P.UNLOADED, _GONE),
        _E.SEEN_UNKNOWN: (_P.UNLOADED, _FORGOTTEN),
        _E.DROPPED: (_P.UNLOAD_PENDING, ()),
    },
    _P.SERVING: {
        _E.SEEN_CHANGING: (_P.CHANGING, ()),
        _E.SEEN_ENDED: (_P.QUEUED, (Do.NOTE_UNLOADED,)),
        _E.SEEN_UNKNOWN: (_P.QUEUED, _FORGOTTEN),
        _E.DROPPED: (_P.UNLOADING, (Do.UNLOAD,)),
    },
    _P.FAILING: {
        _E.SEEN_SERVED: (_P.FAILING, (Do.UNLOAD,)),
        _E.SEEN_ENDED: (_P.UNLOADED, (Do.NOTE_UNLOADED, Do.NOTE_FAILED)),
        _E.SEEN_UNKNOWN: (_P.UNLOADED, (Do.BLAME, Do.NOTE_UNLOADED, Do.NOTE_FAILED)),
        _E.OVERDUE: (_P.STUCK, (Do.NOTE_FAILED,)),
        _E.DROPPED: (_P.UNLOAD_PENDING, (Do.NOTE_FAILED,)),
    },
    _P.CANCELLED: {
        _E.LOADED: (_P.UNLOADING, (Do.CLEAR, Do.UNLOAD)),
        _E.REFUSED: (_P.UNLOAD_PENDING, (Do.CLEAR,)),
        _E.TIMED_OUT: (_P.STUCK, ()),
        _E.CUT_OFF: (_P.UNLOAD_PENDING, ()),
    },
    _P.UNLOAD_PENDING: {
        _E.SEEN_SERVED: (_P.UNLOADING, (Do.CLEAR, Do.UNLOAD)),
        _E.SEEN_ENDED: (_P.UNLOADED, _GONE),
        _E.SEEN_UNKNOWN: (_P.UNLOADED, _FORGOTTEN),
        _E.OVERDUE: (_P.STUCK, ()),
    },
    _P.UNLOADING: {
        _E.UNLOAD_FAILED: (_P.UNLOAD_PENDING, ()),
        _E.SEEN_SERVED: (_P.UNLOADING, (Do.UNLOAD,)),
        _E.SEEN_ENDED: (_P.UNLOADED, _GONE),
        _E.SEEN_UNKNOWN: (_P.UNLOADED, _FORGOTTEN),
        _E.OVERDUE: (_P.STUCK, ()),
    },
    _P.STUCK: {
        _E.SEEN_SERVED: (_P.UNLOADING, (Do.CLEAR, Do.UNLOAD)),
        _E.SEEN_ENDED: (_P.UNLOADED, _GONE),
        _E.SEEN_UNKNOWN: (_P.UNLOADED, _FORGOTTEN),
    },
}

TABLE: Mapping[tuple[Phase, Event], Entry] = MappingProxyType(
    {(p, e): _TRANSITIONS[p].get(e, (p, ())) for p in Phase for e in Event}
)


def next_of(phase: Phase, event: Event) -> Entry:
    """The phase after `event`, and what is to be done."""
    return TABLE[phase, event]
