"""Which connections an admin port keeps."""

from berth.runtime.admin.connections import Connections


def test_whoever_has_most_connections_that_dawdle_gives_up_its_first() -> None:
    connections: Connections[str] = Connections(4)
    for name, source in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b")):
        assert connections.has_place
        connections.add(name, source)
    assert not connections.has_place
    assert connections.to_evict() == "b1"
    connections.awaits_answer("b1")  # it has said what it wants
    assert connections.to_evict() == "b2"
    connections.remove("b2")
    connections.awaits_answer("b3")
    assert connections.to_evict() == "a1"
    connections.awaits_answer("a1")
    assert connections.to_evict() is None
    connections.answered("b1")  # it does not take it
    assert connections.to_evict() == "b1"
    for name in ("a1", "b1", "b3", "b3"):
        connections.remove(name)
    connections.answered("b1")  # it has gone
    assert (len(connections), list(connections), connections.to_evict()) == (0, [], None)
