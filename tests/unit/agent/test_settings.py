"""node D1: what is text in a config and a number to Triton is written as it was understood, never as it came.

Triton's readers (`ParseIntValue` and its kin) are C++'s `stoi`, `stoull` and `stod`, which take whatever begins as
a number; beyond its type they throw `out_of_range`, which nothing catches: Triton ends, for everybody.
"""

import random
import re
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.admission.backends import ACCELERATORS, BACKENDS
from agent.admission.settings import Choice, Either, Integer, ListOf, Real, Setting, Switch
from berth.triton.wire import model_config_pb2 as pb
from tests.fakes.admission import parameter, text_of, understood

PARAMETERS = [
    (backend, name, setting)
    for backend, known in sorted(BACKENDS.items())
    for name, setting in sorted(known.parameters.items())
]
ACCELERATED = [
    (accelerator, name, setting)
    for accelerator, known in sorted(ACCELERATORS.items())
    for name, setting in sorted(known.items())
]

# What an attack found, and its kin: each begins as a number to C++ and is a number to Python, or is too large.
TRICKS = [
    "99999999999",
    "9999999999e-9",
    "99999e-3",
    "99999999999e-8",
    "9" * 20,
    "9" * 400,
    "-99999999999",
    "1_0",
    " 7",
    "7 ",
    "\t7",
    "7\n",
    "7.0",
    "7.",
    "0x7",
    "007",
    "+7",
    "-0",
    "\N{ARABIC-INDIC DIGIT SEVEN}",
    "\N{FULLWIDTH DIGIT SEVEN}",
    "7abc",
    "",
    "-",
    "1e400",
    "1e-400",
    "1e-40",
    "inf",
    "nan",
    "Infinity",
    "tRuE",
    "yes",
    "2147483648",
    "2147483647",
    "-2147483649",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "4294967296",
    "0",
    "1",
    "-1",
    "128",
    "auto",
    "AUTO",
    "cpu:0;gpu:99999999999",
    "cpu:0;gpu:0",
]


def stoi(text: str, lowest: int, highest: int) -> int:
    """C++'s, as strict as its strictest caller: nothing before, nothing behind, none out of range."""
    assert re.fullmatch(r"0|-?[1-9][0-9]*", text, re.ASCII), text
    assert lowest <= int(text) <= highest, text
    return int(text)


def stof(text: str) -> None:
    """A float of 32 bits, with its digits: C calls what is nearer to zero out of range, too."""
    assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?", text, re.ASCII), text
    size = abs(struct.unpack("f", struct.pack("f", float(text)))[0])
    assert size == 0 == float(text) or 2.0**-126 <= size < 2.0**128, text


def read_as_triton_does(setting: Setting, text: str) -> None:
    """No reader of a setting of this kind stumbles over it, or takes it for anything else."""
    match setting:
        case Integer(lowest, highest):
            of_type = (-(2**31), 2**31 - 1) if highest < 2**31 else (0, 2**64 - 1)
            assert lowest <= stoi(text, *of_type) <= highest
        case Real(highest):
            stof(text)
            assert abs(float(text)) <= highest
        case Switch(on, off):
            assert text in (on, off)
        case Choice(words):
            assert text in words
        case Either(one, other):
            read_as_triton_does(other if one.written(text) is None else one, text)
        case ListOf():
            for word in text.split(setting.between):
                stoi(word.partition(":")[2], 0, 99)
        case _:
            raise AssertionError(setting)


def texts(setting: Setting, dice: random.Random) -> Iterator[str]:
    yield from TRICKS
    digits = "0123456789+-. eExX_,;:\0\t\u0667abcTRUEtruefalsON"
    for _ in range(60):
        yield "".join(dice.choice(digits) for _ in range(dice.randrange(12)))
    for low, high in _bounds(setting):
        yield from map(str, (low - 1, low, high, high + 1))


def _bounds(setting: Setting) -> list[tuple[int, int]]:
    if isinstance(setting, Either):
        return _bounds(setting.one) + _bounds(setting.other)
    return [(setting.lowest, setting.highest)] if isinstance(setting, Integer) else []


def accelerator(kind: str, name: str, value: str) -> tuple[bytes, Callable[[pb.ModelConfig], str]]:
    config = pb.ModelConfig(backend="onnxruntime")
    accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
    accelerators.add(name=kind).parameters[name] = value
    return text_of(config), lambda config: str(
        config.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters[name]
    )


@pytest.mark.parametrize(
    ("way", "of", "name", "setting"),
    [(parameter, *one) for one in PARAMETERS] + [(accelerator, *one) for one in ACCELERATED],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_written_is_read_alike_by_all_and_is_a_fixpoint(
    way: Callable[[str, str, str], tuple[bytes, Callable[[pb.ModelConfig], str]]],
    of: str,
    name: str,
    setting: Setting,
) -> None:
    """node D1: over tricks and random texts, whatever is taken is understood as one reader and the next take it."""
    taken = 0
    for text in texts(setting, random.Random(f"{of} {name}")):
        if (one := understood(*way(of, name, text))) is None:
            continue
        taken += 1
        read_as_triton_does(setting, one)
        assert understood(*way(of, name, one)) == one
    assert taken or isinstance(setting, Choice)


PROFILE = 'backend: "tensorrt" instance_group [ { profile: "%s" } ]'


@pytest.mark.parametrize(
    ("said", "expected"), [("0", "0"), ("007", "7"), ("99999999999", None), ("1e0", None), ("10000", None)]
)
def test_a_profile_is_a_number(said: str, expected: str | None) -> None:
    """node D1: Triton's core and the TensorRT backend read it by `stoi`."""
    config = (PROFILE % said).encode()
    assert understood(config, lambda config: str(config.instance_group[0].profile[0])) == expected


GRAPH = """backend: "tensorrt" optimization { cuda { graphs: true graph_spec [ { batch_size: 1
  input { key: "I" value { dim: [ %d ] } } } ] } }"""


@pytest.mark.parametrize(("size", "is_taken"), [(2**31 - 1, True), (2**31, False)])
def test_a_captured_graphs_dimensions_fit_32_bits(size: int, is_taken: bool) -> None:
    """node D1: they reach the TensorRT backend as text, which it reads by `stoi`."""
    assert (understood((GRAPH % size).encode(), lambda config: config.backend) is not None) == is_taken
