"""Which ports are a model's, and for how long."""

from berth.contract.scaling import ModelKey
from scaler.activation.ports import REUSE_AFTER_NS, PortAllocator, PortPair
from scaler.go import SECOND_NS

A, B, C = (ModelKey("a", name) for name in "xyz")
NOW = 1_700_000_000 * SECOND_NS


def test_a_model_keeps_its_ports_and_nobody_else_gets_them() -> None:
    ports = PortAllocator()
    pairs = {ports.allocate(ModelKey("a", f"m{n}")) for n in range(3000)}
    assert len(pairs) == 3000
    assert all(p and p.rest % 2 == 0 and p.grpc == p.rest + 1 and 20000 <= p.rest < 30000 for p in pairs)
    assert ports.allocate(ModelKey("a", "m7")) == ports.get(ModelKey("a", "m7"))


def test_a_scaler_that_starts_finds_a_models_ports_again() -> None:
    assert PortAllocator().allocate(A) == PortAllocator().allocate(A)
    one, other = PortAllocator(), PortAllocator()
    assert {one.allocate(ModelKey("a", f"m{n}")) for n in range(9)} == {
        other.allocate(ModelKey("a", f"m{n}")) for n in range(9)
    }


def test_what_a_slice_says_goes_before_what_the_name_says() -> None:
    ports = PortAllocator()
    mine = PortAllocator().allocate(A)
    assert mine is not None
    assert ports.adopt(B, mine.grpc) == mine
    assert ports.allocate(B) == mine != ports.allocate(A)


def test_a_slice_gives_nobody_the_ports_of_another_and_none_that_are_not_ours() -> None:
    ports = PortAllocator()
    pair = ports.allocate(A)
    assert pair is not None
    assert ports.adopt(B, pair.rest) is None
    assert ports.adopt(A, pair.rest) == pair
    for port in (0, -1, 80, 19999, 30000, 65536):
        assert ports.adopt(C, port) is None
    # One that has some keeps them, whatever a second slice says.
    assert ports.adopt(A, 20000 if pair.rest != 20000 else 20002) is None


def test_a_namespace_does_not_get_all_of_them() -> None:
    ports = PortAllocator(range(20000, 20180))
    greedy = [ModelKey("a", f"m{n}") for n in range(100)]
    assert sum(ports.allocate(one) is not None for one in greedy) == 60
    assert sum(ports.allocate(ModelKey("b", f"m{n}")) is not None for n in range(100)) == 20
    # Those that have some keep them; what is gone counts until it is free.
    assert ports.allocate(greedy[0]) is not None
    for one in greedy[:60]:
        ports.release(one, NOW)
    assert ports.allocate(greedy[80]) is None
    ports.expire(NOW + REUSE_AFTER_NS)
    assert sum(ports.allocate(one) is not None for one in greedy) > 40


def test_they_are_free_five_minutes_after_the_model_has_gone() -> None:
    ports = PortAllocator(range(20000, 20002))
    assert ports.allocate(A) == PortPair(20000, 20001)
    assert ports.allocate(B) is None
    ports.release(A, NOW)
    ports.release(A, NOW + SECOND_NS)
    ports.expire(NOW + REUSE_AFTER_NS - 1)
    assert ports.allocate(B) is None
    ports.expire(NOW + REUSE_AFTER_NS)
    assert ports.allocate(B) == PortPair(20000, 20001)
    assert ports.get(A) is None


def test_one_that_comes_back_in_time_has_them_still() -> None:
    ports = PortAllocator(range(20000, 20004))
    pair = ports.allocate(A)
    ports.release(A, NOW)
    assert ports.allocate(A) == pair
    ports.expire(NOW + 2 * REUSE_AFTER_NS)
    assert ports.get(A) == pair
    ports.release(B, NOW)  # never had any
    ports.expire(NOW + 2 * REUSE_AFTER_NS)
    assert len(ports) == 1


def test_what_is_free_is_a_namespaces_again_one_by_one() -> None:
    ports = PortAllocator(range(20000, 20180))
    models = [ModelKey("a", f"m{n}") for n in range(60)]
    assert all(ports.allocate(one) is not None for one in models)
    ports.release(models[0], NOW)
    ports.expire(NOW + REUSE_AFTER_NS)
    assert sum(ports.allocate(ModelKey("a", f"n{n}")) is not None for n in range(9)) == 1
    for one in [*models, *(ModelKey("a", f"n{n}") for n in range(9))]:
        ports.release(one, NOW)
    ports.expire(NOW + REUSE_AFTER_NS)
    assert not any(value for value in vars(ports).values() if isinstance(value, dict))


def test_one_whose_slice_stands_is_not_gone() -> None:
    ports = PortAllocator(range(20000, 20004))
    pair = ports.allocate(A)
    assert pair is not None
    ports.release(A, NOW)
    assert ports.adopt(A, pair.grpc) == pair
    ports.expire(NOW + REUSE_AFTER_NS)
    assert ports.get(A) == pair
