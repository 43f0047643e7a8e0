"""One model's life in Triton: its phases, what may happen, and what is to be done then. Pure.

The whole of it is `TABLE`. A phase says what Triton may hold and who waits for what; nothing that
happens is without an entry, so that no order of events, late answer or death of anybody is a case apart.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Phase(str, Enum):
    OUT = "out"  # Triton does not hold it as far as is known, and nobody waits for it
    TELLING = "telling"  # to be loaded, once the node's report lists it
    QUEUED = "queued"  # to be loaded, in its turn
    LOADING = "loading"  # a call of this agent is under way
    MOVING = "moving"  # Triton is at it, or may be, and no call of this agent will tell the end
    LATE = "late"  # as MOVING, longer than a load may take: told as failed
    SERVING = "serving"
    FAILING = "failing"  # refused or wrong; what Triton may hold of it is being taken away
    DOOMED = "doomed"  # LOADING, and not wanted any more
    ENDING = "ending"  # not wanted; Triton may hold it
    LEAVING = "leaving"  # not wanted; Triton has been asked to unload it
    STUCK = "stuck"  # not wanted, and Triton has not let go of it in time

    @property
    def may_be_held(self) -> bool:
        """Triton may have memory of it."""
        return self not in (Phase.OUT, Phase.TELLING, Phase.QUEUED)

    @property
    def is_under_way(self) -> bool:
        """Triton may be at it: what it takes is changing, or may be."""
        return self.may_be_held and self is not Phase.SERVING

    @property
    def hangs(self) -> bool:
        """Triton has been at it for longer than it may: nobody waits for its end any more."""
        return self in (Phase.LATE, Phase.STUCK)

    @property
    def awaits_sight(self) -> bool:
        """It goes on by what Triton's index will say of it."""
        return self in (Phase.QUEUED, Phase.MOVING, Phase.FAILING, Phase.ENDING, Phase.LEAVING)

    @property
    def is_load(self) -> bool:
        """Who asked for the load waits still."""
        return self in (Phase.TELLING, Phase.QUEUED, Phase.LOADING, Phase.MOVING, Phase.FAILING)


class Event(str, Enum):
    # What is wanted.
    ASKED = "asked"  # load it
    TOLD = "told"  # the report lists it
    TURN = "turn"  # its turn to be loaded has come
    DENIED = "denied"  # it is not to be loaded
    DROPPED = "dropped"  # take it out of Triton
    # How a call of ours has ended.
    LOADED = "loaded"
    REFUSED = "refused"  # Triton says why not; or it serves in a wrong way
    TIMED_OUT = "timed out"  # Triton goes on with it
    CUT_OFF = "cut off"  # Triton has gone away, or its answer was lost
    NOT_UNLOADED = "not unloaded"  # the call failed
    # What Triton's index says.
    SEEN_SERVED = "seen served"
    SEEN_MOVING = "seen moving"  # being loaded or unloaded
    SEEN_ENDED = "seen ended"  # not held any more, and this Triton remembers it
    SEEN_UNKNOWN = "seen unknown"  # this Triton has never had it
    # It has been in its phase for longer than it may.
    OVERDUE = "overdue"


class Do(str, Enum):
    """What the caller has to do after a transition."""

    TELL = "tell"  # wait until the report lists it, then TOLD
    LOAD = "load"  # call Triton
    UNLOAD = "unload"  # call Triton
    NOTE_SERVED = "note served"  # it serves
    NOTE_LATE = "note late"  # its load has taken too long
    NOTE_FAILED = "note failed"  # its load has failed
    NOTE_OUT = "note out"  # Triton does not hold it
    GIVE_UP = "give up"  # who waits for the load waits in vain
    CLEAR = "clear"  # whatever became of its load, Triton has survived it
    BLAME = "blame"  # Triton has restarted: the loads that were open then are suspect


_E, _P = Event, Phase
Entry = tuple[Phase, tuple[Do, ...]]
_GONE, _FORGOTTEN = (Do.CLEAR, Do.NOTE_OUT), (Do.BLAME, Do.NOTE_OUT)

# What is not listed changes nothing.
_TRANSITIONS: dict[Phase, dict[Event, Entry]] = {
    _P.OUT: {
        _E.ASKED: (_P.TELLING, (Do.TELL,)),
        _E.DROPPED: (_P.ENDING, ()),
    },
    _P.TELLING: {
        _E.TOLD: (_P.QUEUED, ()),
        _E.DENIED: (_P.OUT, (Do.GIVE_UP,)),
        _E.DROPPED: (_P.ENDING, (Do.GIVE_UP,)),
    },
    _P.QUEUED: {
        _E.TURN: (_P.LOADING, (Do.LOAD,)),
        _E.DENIED: (_P.OUT, (Do.GIVE_UP,)),
        _E.DROPPED: (_P.ENDING, (Do.GIVE_UP,)),
        # An earlier agent, or a load whose answer was lost, has done it or is at it.
        _E.SEEN_SERVED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.SEEN_MOVING: (_P.MOVING, ()),
    },
    _P.LOADING: {
        _E.LOADED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.REFUSED: (_P.FAILING, (Do.CLEAR,)),
        _E.TIMED_OUT: (_P.LATE, (Do.NOTE_LATE,)),
        _E.CUT_OFF: (_P.MOVING, ()),
        _E.DROPPED: (_P.DOOMED, (Do.GIVE_UP,)),
    },
    _P.MOVING: {
        _E.SEEN_SERVED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.SEEN_ENDED: (_P.QUEUED, _GONE),
        _E.SEEN_UNKNOWN: (_P.QUEUED, _FORGOTTEN),
        _E.OVERDUE: (_P.LATE, (Do.NOTE_LATE,)),
        _E.DROPPED: (_P.ENDING, (Do.GIVE_UP,)),
    },
    _P.LATE: {
        _E.SEEN_SERVED: (_P.SERVING, (Do.CLEAR, Do.NOTE_SERVED)),
        _E.SEEN_ENDED: (_P.OUT, _GONE),
        _E.SEEN_UNKNOWN: (_P.OUT, _FORGOTTEN),
        _E.DROPPED: (_P.ENDING, ()),
    },
    _P.SERVING: {
        _E.SEEN_MOVING: (_P.MOVING, ()),
        _E.SEEN_ENDED: (_P.QUEUED, (Do.NOTE_OUT,)),
        _E.SEEN_UNKNOWN: (_P.QUEUED, _FORGOTTEN),
        _E.DROPPED: (_P.LEAVING, (Do.UNLOAD,)),
    },
    _P.FAILING: {
        _E.SEEN_SERVED: (_P.FAILING, (Do.UNLOAD,)),
        _E.SEEN_ENDED: (_P.OUT, (Do.NOTE_OUT, Do.NOTE_FAILED)),
        _E.SEEN_UNKNOWN: (_P.OUT, (Do.BLAME, Do.NOTE_OUT, Do.NOTE_FAILED)),
        _E.OVERDUE: (_P.STUCK, (Do.NOTE_FAILED,)),
        _E.DROPPED: (_P.ENDING, (Do.NOTE_FAILED,)),
    },
    _P.DOOMED: {
        _E.LOADED: (_P.LEAVING, (Do.CLEAR, Do.UNLOAD)),
        _E.REFUSED: (_P.ENDING, (Do.CLEAR,)),
        _E.TIMED_OUT: (_P.STUCK, ()),
        _E.CUT_OFF: (_P.ENDING, ()),
    },
    _P.ENDING: {
        _E.SEEN_SERVED: (_P.LEAVING, (Do.CLEAR, Do.UNLOAD)),
        _E.SEEN_ENDED: (_P.OUT, _GONE),
        _E.SEEN_UNKNOWN: (_P.OUT, _FORGOTTEN),
        _E.OVERDUE: (_P.STUCK, ()),
    },
    _P.LEAVING: {
        _E.NOT_UNLOADED: (_P.ENDING, ()),
        _E.SEEN_SERVED: (_P.LEAVING, (Do.UNLOAD,)),
        _E.SEEN_ENDED: (_P.OUT, _GONE),
        _E.SEEN_UNKNOWN: (_P.OUT, _FORGOTTEN),
        _E.OVERDUE: (_P.STUCK, ()),
    },
    _P.STUCK: {
        _E.SEEN_SERVED: (_P.LEAVING, (Do.CLEAR, Do.UNLOAD)),
        _E.SEEN_ENDED: (_P.OUT, _GONE),
        _E.SEEN_UNKNOWN: (_P.OUT, _FORGOTTEN),
    },
}

TABLE: Mapping[tuple[Phase, Event], Entry] = MappingProxyType(
    {(p, e): _TRANSITIONS[p].get(e, (p, ())) for p in Phase for e in Event}
)


def next_of(phase: Phase, event: Event) -> Entry:
    """The phase after `event`, and what is to be done."""
    return TABLE[phase, event]
