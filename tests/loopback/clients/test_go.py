"""Programs in Go: grpc-go, connect-go and HTTP/2 of x/net, as service meshes and gateways of models are written."""

import asyncio
from pathlib import Path

import pytest

from tests.loopback.clients.conftest import Served
from tests.loopback.clients.messages import ask_by_go, message

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1024**2
KINDS = ("grpc", "connect", "http2")


@pytest.mark.parametrize("kind", KINDS)
async def test_every_call_has_headers_and_a_deadline_of_its_own(
    served: Served, tmp_path: Path, kind: str
) -> None:
    told = await ask_by_go(
        tmp_path,
        message("echo", b"abc"),
        *(f"-kind={kind}", f"-address={served.grpc}", "-connections=2", "-streams=8", "-calls=25"),
        *("-traceparent", "-deadline=60s"),
    )
    assert told["codes"] == {"OK": 400}, told


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_of_135_mebibytes(served: Served, tmp_path: Path, kind: str) -> None:
    """Longer than any window that a client of Go opens at first."""
    told = await ask_by_go(
        tmp_path,
        message("echo", b"abc", bytes=135 * MIB),
        *(f"-kind={kind}", f"-address={served.grpc}", "-calls=2", "-deadline=60s"),
    )
    assert told["codes"] == {"OK": 2}, told
    assert told["largest"] >= 135 * MIB


@pytest.mark.parametrize("window", [65536, MIB])
async def test_windows_that_never_grow(served: Served, tmp_path: Path, window: int) -> None:
    """Large answers and small ones share the connection's window."""
    large = ask_by_go(
        tmp_path,
        message("echo", b"abc", bytes=40 * MIB),
        *(f"-address={served.grpc}", f"-window={window}", "-streams=3", "-calls=2", "-deadline=60s"),
    )
    told = await large
    assert told["codes"] == {"OK": 6}, told
    assert told["bytes"] >= 6 * 40 * MIB


async def test_requests_of_many_windows_at_once(served: Served, tmp_path: Path) -> None:
    """More of them on a connection than may be in Triton: those that wait keep no window from those that run."""
    told = await ask_by_go(
        tmp_path,
        message("echo", bytes(600_000)),
        *(f"-address={served.grpc}", "-streams=24", "-calls=3", "-deadline=60s"),
    )
    assert told["codes"] == {"OK": 72}, told


async def test_who_leaves_or_reads_slowly_takes_nothing_from_others(served: Served, tmp_path: Path) -> None:
    """Clients that drop large answers, one that dawdles, and deadlines that pass; beside them ordinary calls."""
    for name in ("left", "slow", "late", "ordinary"):
        (tmp_path / name).mkdir()
    large, small = message("echo", b"abc", bytes=20 * MIB), message("echo", b"abc")
    address = f"-address={served.grpc}"
    left, slow, late, ordinary = await asyncio.gather(
        ask_by_go(tmp_path / "left", large, address, "-kind=http2", "-drop", "-streams=2", "-calls=5"),
        ask_by_go(tmp_path / "slow", large, address, "-kind=http2", "-delay=5ms", "-calls=1"),
        ask_by_go(
            tmp_path / "late",
            message("echo", b"abc", sleep_ms=20),
            *(address, "-streams=8", "-calls=5", "-deadline=30ms", "-jitter"),
        ),
        ask_by_go(tmp_path / "ordinary", small, address, "-streams=4", "-calls=25", "-deadline=60s"),
    )
    assert (left["done"], slow["codes"], ordinary["codes"]) == (10, {"OK": 1}, {"OK": 100}), (
        left,
        slow,
        ordinary,
    )
    assert (late["done"], late["late"]) == (40, 0), late
    assert set(late["codes"]) <= {"OK", "DeadlineExceeded"}, late
    # Nothing of them has stayed: as many as before at once, and large ones too.
    after = await ask_by_go(tmp_path, large, address, "-streams=4", "-calls=1", "-deadline=60s")
    assert after["codes"] == {"OK": 4}, after
