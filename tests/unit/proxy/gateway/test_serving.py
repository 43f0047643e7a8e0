"""What the copies of a gateway's process share, without a socket."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint, UnixSocket
from berth.contract.gateway import ReplicaLimits
from berth.runtime.errors import EXIT_CANNOT_START, CannotStart
from proxy.gateway import worker as worker_module
from proxy.gateway.app import Gateway
from proxy.gateway.config import GatewayOptions
from proxy.gateway.serving import _Parts
from proxy.request.replica import Replica
from tests.fakes.agent_control import copy_of


def options(**more: Any) -> GatewayOptions:
    return GatewayOptions(control=UnixSocket("/nowhere"), listen=Endpoint("127.0.0.1", 0), **more)


@contextmanager
def copies(share: int, **more: Any) -> Iterator[list[Replica]]:
    """Two, in one of so many processes."""
    parts = _Parts(options(**more), share, lambda _: None)
    limits = ReplicaLimits(queue_depth=100)
    made = [parts._make_copy(copy_of(uid, limits=limits)) for uid in "ab"]
    yield made
    for one in made:
        one.admissions.close()


@pytest.mark.parametrize(("share", "running"), [(1, [7, 3]), (2, [4, 2])])
async def test_all_copies_of_all_processes_have_so_many_rest_requests_with_triton(
    share: int, running: list[int]
) -> None:
    """Triton drops the answers of more (exchange/outstanding.py, which says how copies share 16, or 8)."""
    with copies(share, triton_rest_requests=16) as made:
        for one in made:
            for _ in range(40):
                one.admissions.admit(0.0, list, is_rest=True)
        assert [one.admissions.running for one in made] == running


@pytest.mark.parametrize("share", [1, 2])
async def test_all_copies_of_all_processes_keep_to_one_memory(share: int) -> None:
    """One may have as much as it leaves to the others, of its process' part (exchange/budget.py)."""
    with copies(share, memory_budget=1000) as (first, second):
        for budget, most in ((first.budget, 500 // share), (second.budget, 250 // share)):
            assert not budget.take(most + 1)
            assert budget.take(most)


async def test_each_worker_has_its_part_of_what_all_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def open_data_plane(_: object, *, share: int, **__: object) -> None:
        asked.append(share)
        raise CannotStart("that is all")

    for name, instead in (
        ("open_data_plane", open_data_plane),
        ("settle", lambda: None),
        ("configure_logging", lambda **_: None),
    ):
        monkeypatch.setattr(worker_module, name, instead)
    ours, theirs = socket.socketpair()
    listening, there = socket.socketpair()
    with ours, theirs, listening, there:
        worker = worker_module.Worker(theirs)
        worker._options.set_result(options(workers=8))
        assert await worker.run(listening) == EXIT_CANNOT_START
        worker._channel.close()
    assert asked == [8]


async def test_what_is_told_of_loads_is_old_when_another_second_has_closed() -> None:
    """A scaler that asks each second would else be told of the second before the last."""
    plane: Any = SimpleNamespace(
        on_news=lambda *_: None, statuses=list, seconds=lambda: plane.closed, closed=1
    )
    page = Gateway(options(), plane)._stat()
    before = page.news()
    assert page.news() == before
    plane.closed = 2
    assert page.news() != before
