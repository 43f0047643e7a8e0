"""Which ports are a model's, and for how long."""

from berth.contract.scaling import ModelKey
from scaler.activation.ports import FREED_AFTER_NS, PortPair, Ports
from scaler.go import SECOND_NS

A, B, C = (ModelKey("a", name) for name in "xyz")
NOW = 1_700_000_000 * SECOND_NS


def test_a_model_keeps_its_ports_and_nobody_else_gets_them() -> None:
    ports = Ports()
    pairs = {ports.of(ModelKey("a", f"m{n}")) for n in range(3000)}
    assert len(pairs) == 3000
    assert all(p and p.rest % 2 == 0 and p.grpc == p.rest + 1 and 20000 <= p.rest < 30000 for p in pairs)
    assert ports.of(ModelKey("a", "m7")) == ports.known(ModelKey("a", "m7"))


def test_a_scaler_that_starts_finds_a_models_ports_again() -> None:
    assert Ports().of(A) == Ports().of(A)
    one, other = Ports(), Ports()
    assert {one.of(ModelKey("a", f"m{n}")) for n in range(9)} == {
        other.of(ModelKey("a", f"m{n}")) for n in range(9)
    }


def test_what_a_slice_says_goes_before_what_the_name_says() -> None:
    ports = Ports()
    mine = Ports().of(A)
    assert mine is not None
    assert ports.adopt(B, mine.grpc) == mine
    assert ports.of(B) == mine != ports.of(A)


def test_a_slice_gives_nobody_the_ports_of_another_and_none_that_are_not_ours() -> None:
    ports = Ports()
    pair = ports.of(A)
    assert pair is not None
    assert ports.adopt(B, pair.rest) is None
    assert ports.adopt(A, pair.rest) == pair
    for port in (0, -1, 80, 19999, 30000, 65536):
        assert ports.adopt(C, port) is None
    # One that has some keeps them, whatever a second slice says.
    assert ports.adopt(A, 20000 if pair.rest != 20000 else 20002) is None


def test_a_namespace_does_not_get_all_of_them() -> None:
    ports = Ports(range(20000, 20180))
    greedy = [ModelKey("a", f"m{n}") for n in range(100)]
    assert sum(ports.of(one) is not None for one in greedy) == 60
    assert sum(ports.of(ModelKey("b", f"m{n}")) is not None for n in range(100)) == 20
    # Those that have some keep them; what is gone counts until it is free.
    assert ports.of(greedy[0]) is not None
    for one in greedy[:60]:
        ports.gone(one, NOW)
    assert ports.of(greedy[80]) is None
    ports.expire(NOW + FREED_AFTER_NS)
    assert sum(ports.of(one) is not None for one in greedy) > 40


def test_they_are_free_five_minutes_after_the_model_has_gone() -> None:
    ports = Ports(range(20000, 20002))
    assert ports.of(A) == PortPair(20000, 20001)
    assert ports.of(B) is None
    ports.gone(A, NOW)
    ports.gone(A, NOW + SECOND_NS)
    ports.expire(NOW + FREED_AFTER_NS - 1)
    assert ports.of(B) is None
    ports.expire(NOW + FREED_AFTER_NS)
    assert ports.of(B) == PortPair(20000, 20001)
    assert ports.known(A) is None


def test_one_that_comes_back_in_time_has_them_still() -> None:
    ports = Ports(range(20000, 20004))
    pair = ports.of(A)
    ports.gone(A, NOW)
    assert ports.of(A) == pair
    ports.expire(NOW + 2 * FREED_AFTER_NS)
    assert ports.known(A) == pair
    ports.gone(B, NOW)  # never had any
    ports.expire(NOW + 2 * FREED_AFTER_NS)
    assert len(ports) == 1


def test_what_is_free_is_a_namespaces_again_one_by_one() -> None:
    ports = Ports(range(20000, 20180))
    models = [ModelKey("a", f"m{n}") for n in range(60)]
    assert all(ports.of(one) is not None for one in models)
    ports.gone(models[0], NOW)
    ports.expire(NOW + FREED_AFTER_NS)
    assert sum(ports.of(ModelKey("a", f"n{n}")) is not None for n in range(9)) == 1
    for one in [*models, *(ModelKey("a", f"n{n}") for n in range(9))]:
        ports.gone(one, NOW)
    ports.expire(NOW + FREED_AFTER_NS)
    assert not any(value for value in vars(ports).values() if isinstance(value, dict))


def test_one_whose_slice_stands_is_not_gone() -> None:
    ports = Ports(range(20000, 20004))
    pair = ports.of(A)
    assert pair is not None
    ports.gone(A, NOW)
    assert ports.adopt(A, pair.grpc) == pair
    ports.expire(NOW + FREED_AFTER_NS)
    assert ports.known(A) == pair
