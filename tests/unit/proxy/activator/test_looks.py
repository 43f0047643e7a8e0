"""How often a copy that does not serve yet is asked whether it does, whoever waits for it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from berth.contract.scaling import PodEndpoint
from proxy.activator.answers import Memory
from proxy.activator.hold import Looks
from proxy.activator.pod import Pod
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import AnswerReaders
from tests.fakes import leaping

REPLICAS = 16
TOLD = PodEndpoint(
    uid="u", name="p", address="127.0.0.1", rest_port=1, grpc_port=0, slots=1, ready=False, soon=True
)


def asked_each_second(
    monkeypatch: pytest.MonkeyPatch, seconds: int, each_second: Callable[[Pod], None]
) -> list[int]:
    """The questions to replicas that never serve, second by second."""
    asked = 0

    async def never(self: Pod, path: str) -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(Pod, "_says_ready", never)
    found: list[int] = []

    async def story() -> None:
        looks = Looks()
        pods = [
            Pod(TOLD, Memory("m"), WriteBatch(), AnswerReaders(), lambda pod: None, looks)
            for _ in range(REPLICAS)
        ]
        for _ in range(seconds):
            before = asked
            await asyncio.sleep(1)
            found.append(asked - before)
            for pod in pods:
                each_second(pod)
        for pod in pods:
            await pod.close()

    leaping.run(story())
    return found


def test_clients_that_come_and_leave_keep_up_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """autoscaling D6: each client that came began it anew, 1 255 questions a second of one model, for ever."""
    found = asked_each_second(monkeypatch, 120, Pod.look_again)
    assert min(found[1:3]) > REPLICAS * 50  # at first each is asked as soon as it may serve
    assert max(found[10:60]) <= REPLICAS * 27
    assert max(found[100:]) <= REPLICAS * 8
    assert min(found[100:]) >= REPLICAS * 2


def test_a_copy_whose_loader_is_done_only_now_is_asked_in_a_hurry_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """autoscaling D6: what a copy has to do before may take long; the moment after it is what somebody waits for."""
    seconds = 0

    def loads(pod: Pod) -> None:
        nonlocal seconds
        seconds += 1
        pod.tell(replace(TOLD, soon=seconds > 90 * REPLICAS))

    found = asked_each_second(monkeypatch, 120, loads)
    assert max(found[70:90]) <= REPLICAS * 8
    assert max(found[90:95]) > REPLICAS * 50
    assert max(found[105:]) <= REPLICAS * 27


def test_a_copy_of_which_other_things_change_is_in_no_hurry_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """autoscaling D6: readiness that comes and goes is its tenant's to make."""
    flips = 0

    def flap(pod: Pod) -> None:
        nonlocal flips
        flips += 1
        pod.tell(replace(TOLD, ready=bool(flips // REPLICAS % 2)))

    assert max(asked_each_second(monkeypatch, 60, flap)[10:]) <= REPLICAS * 27
