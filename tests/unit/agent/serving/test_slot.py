"""One slot: whose memory moves, and who waits for what."""

import asyncio

import pytest

from agent.serving.model_fsm import Phase
from agent.serving.slot import Slot
from berth.contract.ids import ServerName
from berth.triton.errors import TritonUnavailable

# By phase: whether its memory is changing, and whether it goes on by Triton's index; with somebody who waits for its
# unload, and without.
TABLE = {
    Phase.UNLOADED: ((False, False), (False, False)),
    Phase.REPORTING: ((False, False), (False, False)),
    Phase.QUEUED: ((False, True), (False, True)),
    Phase.LOADING: ((True, False), (True, False)),
    Phase.CHANGING: ((True, True), (True, True)),
    Phase.LATE: ((False, False), (False, False)),
    Phase.SERVING: ((False, False), (False, False)),
    Phase.FAILING: ((True, True), (True, True)),
    Phase.CANCELLED: ((True, False), (True, False)),
    Phase.UNLOAD_PENDING: ((True, True), (False, False)),
    Phase.UNLOADING: ((True, True), (False, False)),
    Phase.STUCK: ((False, False), (False, False)),
}


@pytest.mark.parametrize("phase", Phase)
async def test_what_a_phase_means_to_others(phase: Phase) -> None:
    for is_awaited, expected in zip((True, False), TABLE[phase], strict=True):
        slot = Slot(ServerName("m"), since=0.0, phase=phase)
        slot.out = asyncio.get_running_loop().create_future() if is_awaited else None
        assert (slot.is_busy, slot.needs_look(is_away=False)) == expected


@pytest.mark.parametrize(
    ("is_seen", "is_away", "needs"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_a_queued_load_needs_one_look_and_one_more_while_triton_is_away(
    is_seen: bool, is_away: bool, needs: bool
) -> None:
    slot = Slot(ServerName("m"), since=0.0, phase=Phase.QUEUED, is_seen=is_seen)
    assert slot.needs_look(is_away=is_away) is needs


async def test_an_unload_ends_once() -> None:
    slot = Slot(ServerName("m"), since=0.0)
    slot.end_unload()  # nobody waits
    slot.out = asyncio.get_running_loop().create_future()
    slot.end_unload(TritonUnavailable("away"))
    slot.end_unload()
    with pytest.raises(TritonUnavailable, match="away"):
        await slot.out
    slot.out = asyncio.get_running_loop().create_future()
    slot.end_unload()
    await slot.out
