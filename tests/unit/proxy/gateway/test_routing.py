"""Which connections get to which replica, without a socket."""

from proxy.wire.preamble import Kind
from tests.fakes.data_plane import Wire
from tests.fakes.gateway_plane import Plane, spec_of


async def test_a_replica_that_takes_all_connections_it_can_get_leaves_some_for_others() -> None:
    plane = Plane(most_connections=10)
    await plane.apply(spec_of("a", "b"))
    first = [plane.connect("a") for _ in range(10)]
    assert sum(one is not None for one in first) == 5
    assert plane.connect("b") is not None
    assert plane.router.limit.taken == 6
    for one in first[:5]:
        one.connection_lost(None)
    assert plane.router.limit.taken == 1
    assert sum(plane.connect("a") is not None for _ in range(10)) == 5  # as many as before
    await plane.data_plane.close()


async def test_at_the_end_no_connection_is_accepted_and_new_replicas_drain_from_the_start(
    plane: Plane,
) -> None:
    await plane.apply(spec_of("a"))
    plane.data_plane.drain_all()
    assert plane.replica("a").not_ready() == "draining"
    assert plane.connect("a") is None
    assert plane.connect("a", Kind.REPORT) is None
    await plane.apply(spec_of("a", "b"))
    assert plane.replica("b").not_ready() == "draining"
    assert plane.connect("b") is None


async def test_the_end_of_a_process_ends_connections_without_a_ticket(plane: Plane) -> None:
    wire, handshake = Wire(), plane.router.handshakes.handshake()
    handshake.connection_made(wire)
    plane.router.handshakes.close()
    assert wire.aborted
