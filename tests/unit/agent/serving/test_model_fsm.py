"""The table of a model's life, looked at as a whole."""

import pytest

from agent.serving.model_fsm import TABLE, Do, Event, Phase, next_of

SEEN = (Event.SEEN_SERVED, Event.SEEN_CHANGING, Event.SEEN_ENDED, Event.SEEN_UNKNOWN)
UNWANTED = {Phase.CANCELLED, Phase.UNLOAD_PENDING, Phase.UNLOADING, Phase.STUCK}


def test_every_phase_has_an_answer_to_every_event() -> None:
    assert set(TABLE) == {(phase, event) for phase in Phase for event in Event}


@pytest.mark.parametrize("phase", list(Phase))
def test_from_every_phase_a_model_can_be_out_of_triton(phase: Phase) -> None:
    """Whatever it is at, an end can be reached: nothing is for ever but what Triton does for ever."""
    reached, new = {phase}, {phase}
    while new:
        new = {next_of(one, event)[0] for one in new for event in Event} - reached
        reached |= new
    assert Phase.UNLOADED in reached


@pytest.mark.parametrize("phase", list(Phase))
def test_what_is_dropped_is_loaded_no_more_but_by_asking(phase: Phase) -> None:
    after, todo = next_of(phase, Event.DROPPED)
    assert after in UNWANTED
    assert Do.LOAD not in todo
    for event in set(Event) - {Event.REQUESTED}:
        then, todo = next_of(after, event)
        assert then in UNWANTED or then is Phase.UNLOADED
        assert Do.LOAD not in todo


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", list(Event))
def test_memory_is_held_until_triton_says_that_it_is_not(phase: Phase, event: Event) -> None:
    after, todo = next_of(phase, event)
    if phase.may_be_held and not after.may_be_held:
        assert event in (Event.SEEN_ENDED, Event.SEEN_UNKNOWN)
        assert Do.NOTE_UNLOADED in todo


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", list(Event))
def test_triton_is_called_once_and_when_nothing_else_is_under_way(phase: Phase, event: Event) -> None:
    after, todo = next_of(phase, event)
    assert (Do.LOAD in todo) is (phase is Phase.QUEUED and event is Event.TURN)
    if Do.UNLOAD in todo:
        assert after in (Phase.UNLOADING, Phase.FAILING)
        assert phase not in (Phase.LOADING, Phase.CHANGING)  # it would queue behind what Triton is at


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("event", list(Event))
def test_who_waits_for_a_load_is_told_when_nobody_is_at_it_any_more(phase: Phase, event: Event) -> None:
    after, todo = next_of(phase, event)
    if phase.is_load and not after.is_load:
        assert {Do.GIVE_UP, Do.NOTE_SERVED, Do.NOTE_LATE, Do.NOTE_FAILED} & set(todo)


@pytest.mark.parametrize(
    "phase", [phase for phase in Phase if phase.awaits_sight and phase is not Phase.QUEUED]
)
def test_what_waits_for_triton_waits_with_a_bound(phase: Phase) -> None:
    after, _ = next_of(phase, Event.OVERDUE)
    assert after.hangs


@pytest.mark.parametrize("phase", list(Phase))
def test_a_mark_is_taken_away_only_where_triton_has_survived(phase: Phase) -> None:
    for event in Event:
        _, todo = next_of(phase, event)
        if Do.CLEAR in todo:
            assert event in (Event.LOADED, Event.REFUSED, Event.SEEN_SERVED, Event.SEEN_ENDED)
        assert (Do.BLAME in todo) <= (event is Event.SEEN_UNKNOWN)


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.CANCELLED])
def test_what_triton_is_called_for_is_reported_by_the_call_alone(phase: Phase) -> None:
    """Its index may be older than the call."""
    for event in SEEN:
        assert next_of(phase, event) == (phase, ())


STORIES: dict[str, tuple[list[Event], Phase]] = {
    "loaded": ([Event.REQUESTED, Event.REPORTED, Event.TURN, Event.LOADED], Phase.SERVING),
    "found": ([Event.REQUESTED, Event.REPORTED, Event.SEEN_SERVED], Phase.SERVING),
    "found being loaded": (
        [Event.REQUESTED, Event.REPORTED, Event.SEEN_CHANGING, Event.SEEN_CHANGING, Event.SEEN_SERVED],
        Phase.SERVING,
    ),
    "found being unloaded": (
        [Event.REQUESTED, Event.REPORTED, Event.SEEN_CHANGING, Event.SEEN_ENDED, Event.TURN],
        Phase.LOADING,
    ),
    "triton died of somebody": (
        [Event.REQUESTED, Event.REPORTED, Event.TURN, Event.CUT_OFF, Event.SEEN_UNKNOWN],
        Phase.QUEUED,
    ),
    "the answer was lost": (
        [Event.REQUESTED, Event.REPORTED, Event.TURN, Event.CUT_OFF, Event.SEEN_CHANGING, Event.SEEN_SERVED],
        Phase.SERVING,
    ),
    "late, and then there": (
        [
            Event.REQUESTED,
            Event.REPORTED,
            Event.TURN,
            Event.TIMED_OUT,
            Event.SEEN_CHANGING,
            Event.SEEN_SERVED,
        ],
        Phase.SERVING,
    ),
    "loaded in a wrong way": (
        [
            Event.REQUESTED,
            Event.REPORTED,
            Event.TURN,
            Event.REFUSED,
            Event.SEEN_SERVED,
            Event.SEEN_CHANGING,
            Event.SEEN_ENDED,
        ],
        Phase.UNLOADED,
    ),
    "the pod ends in the queue": (
        [Event.REQUESTED, Event.REPORTED, Event.DROPPED, Event.SEEN_UNKNOWN],
        Phase.UNLOADED,
    ),
    "the pod ends during the load": (
        [
            Event.REQUESTED,
            Event.REPORTED,
            Event.TURN,
            Event.DROPPED,
            Event.LOADED,
            Event.SEEN_CHANGING,
            Event.SEEN_ENDED,
        ],
        Phase.UNLOADED,
    ),
    "the pod ends during a load that hangs": (
        [Event.REQUESTED, Event.REPORTED, Event.TURN, Event.DROPPED, Event.TIMED_OUT, Event.SEEN_CHANGING],
        Phase.STUCK,
    ),
    "a finalize that hangs, until Triton is restarted": (
        [
            Event.REQUESTED,
            Event.REPORTED,
            Event.SEEN_SERVED,
            Event.DROPPED,
            Event.SEEN_CHANGING,
            Event.OVERDUE,
            Event.SEEN_UNKNOWN,
        ],
        Phase.UNLOADED,
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_stories(story: str) -> None:
    events, end = STORIES[story]
    phase = Phase.UNLOADED
    for event in events:
        phase, _ = next_of(phase, event)
    assert phase is end
