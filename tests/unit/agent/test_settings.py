"""node D1: what is text in a config and a number to Triton is written as it was understood, never as it came.

Triton's readers (`ParseIntValue` and its kin) are C++'s `stoi`, `stoull` and `stod`, which take whatever begins as
a number; beyond its type they throw `out_of_range`, which nothing catches: Triton ends, for everybody.
"""

import random
import re
import struct
from collections.abc import Callable, Iterator

import pytest
from google.protobuf import text_format

from agent.admission import InvalidModel, ModelFiles, NodeRules, judge
from agent.admission.backends import ACCELERATORS, BACKENDS
from agent.admission.settings import Choice, Either, Integer, ListOf, Real, Setting, Switch
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule
from berth.triton.wire import model_config_pb2 as pb

RULES = NodeRules(frozenset(BACKENDS), CodeRule.ANY)
FILES = ModelFiles(
    dict.fromkeys(
        (
            *("1/model.onnx", "1/model.plan", "1/model.xml", "1/model.bin", "1/xgboost.model", "1/model.py"),
            *("1/model.pt", "1/model.savedmodel", "1/model.dali"),
        ),
        9,
    )
)
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


def parameter(backend: str, name: str, value: str) -> tuple[bytes, Callable[[pb.ModelConfig], str]]:
    config = pb.ModelConfig(backend=backend)
    config.parameters[name].string_value = value
    return _text(config), lambda config: str(config.parameters[name].string_value)


def accelerator(kind: str, name: str, value: str) -> tuple[bytes, Callable[[pb.ModelConfig], str]]:
    config = pb.ModelConfig(backend="onnxruntime")
    accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
    accelerators.add(name=kind).parameters[name] = value
    return _text(config), lambda config: str(
        config.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters[name]
    )


def _text(config: pb.ModelConfig) -> bytes:
    return text_format.MessageToString(config).encode()


def written(config: bytes, reader: Callable[[pb.ModelConfig], str]) -> str | None:
    """What stands in the config that Triton is given; None where there is none."""
    try:
        return reader(judge(config, FILES, ModelName("m"), RULES).config)
    except InvalidModel:
        return None


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
    """node D1: over tricks and random texts, whatever is taken is written as one reader and the next take it."""
    taken = 0
    for text in texts(setting, random.Random(f"{of} {name}")):
        if (one := written(*way(of, name, text))) is None:
            continue
        taken += 1
        read_as_triton_does(setting, one)
        assert written(*way(of, name, one)) == one
    assert taken or isinstance(setting, Choice)


@pytest.mark.parametrize(
    ("backend", "name", "value", "expected"),
    [
        ("onnxruntime", "arena_extend_strategy", "99999999999", None),
        ("onnxruntime", "arena_extend_strategy", "2", None),
        ("onnxruntime", "arena_extend_strategy", "1", "1"),
        ("onnxruntime", "intra_op_thread_count", "9999999999e-9", None),
        ("onnxruntime", "intra_op_thread_count", "99999e-3", None),
        ("onnxruntime", "intra_op_thread_count", "+08", "8"),
        ("onnxruntime", "enable_mem_arena", "Yes", "1"),
        ("onnxruntime", "gpu_mem_limit", "18446744073709551615", "18446744073709551615"),
        ("onnxruntime", "gpu_mem_limit", "18446744073709551616", None),
        ("onnxruntime", "memory.enable_memory_arena_shrinkage", "cpu:0;gpu:0", "cpu:0;gpu:0"),
        ("openvino", "INFERENCE_NUM_THREADS", "99999e-3", None),
        ("openvino", "NUM_STREAMS", "auto", "AUTO"),
        ("openvino", "NUM_STREAMS", "4", "4"),
        ("openvino", "HINT_BF16", "true", "YES"),
        ("openvino", "HINT_BF16", "NO", None),
        ("openvino", "ENABLE_BATCH_PADDING", "1", "YES"),
        ("fil", "threshold", "5e-1", "0.5"),
        ("fil", "threshold", "1e39", None),
        ("fil", "threshold", "1e-45", None),
        ("fil", "predict_proba", "TRUE", "true"),
        ("fil", "chunk_size", "99999999999", None),
        ("fil", "model_type", "xgboost_json", "xgboost_json"),
        ("fil", "model_type", "onnx", None),
        ("tensorrt", "execution_context_allocation_strategy", "static", "STATIC"),
        ("python", "FORCE_CPU_ONLY_INPUT_TENSORS", "YES", "yes"),
        ("python", "anything", "99999999999", "99999999999"),
        ("pytorch", "INTRA_OP_THREAD_COUNT", "99999999999", None),
        ("dali", "num_threads", "99999999999", None),
        ("tensorflow", "TF_NUM_INTRA_THREADS", "99999999999", None),
    ],
)
def test_a_parameter_is_written_as_its_reader_takes_it(
    backend: str, name: str, value: str, expected: str | None
) -> None:
    """node D1."""
    assert written(*parameter(backend, name, value)) == expected


def test_a_number_that_does_not_go_is_told_with_its_bounds() -> None:
    config, _ = parameter("onnxruntime", "intra_op_thread_count", "99999e-3")
    with pytest.raises(InvalidModel, match=r"'99999e-3'; a whole number from 0 to 128 is taken"):
        judge(config, FILES, ModelName("m"), RULES)


PROFILE = 'backend: "tensorrt" instance_group [ { profile: "%s" } ]'


@pytest.mark.parametrize(
    ("said", "expected"), [("0", "0"), ("007", "7"), ("99999999999", None), ("1e0", None), ("10000", None)]
)
def test_a_profile_is_a_number(said: str, expected: str | None) -> None:
    """node D1: Triton's core and the TensorRT backend read it by `stoi`."""
    config = (PROFILE % said).encode()
    assert written(config, lambda config: str(config.instance_group[0].profile[0])) == expected


GRAPH = """backend: "tensorrt" optimization { cuda { graphs: true graph_spec [ { batch_size: 1
  input { key: "I" value { dim: [ %d ] } } } ] } }"""


@pytest.mark.parametrize(("size", "is_taken"), [(2**31 - 1, True), (2**31, False)])
def test_a_captured_graphs_dimensions_fit_32_bits(size: int, is_taken: bool) -> None:
    """node D1: they reach the TensorRT backend as text, which it reads by `stoi`."""
    assert (written((GRAPH % size).encode(), lambda config: config.backend) is not None) == is_taken


NAMES = {
    "python": "FORCE_CPU_ONLY_INPUT_TENSORS",
    "onnxruntime": "arena_extend_strategy cudnn_conv1d_pad_to_nc1d cudnn_conv_algo_search cudnn_conv_use_max_workspace "
    "do_copy_in_default_stream enable_mem_arena enable_mem_pattern execution_mode gpu_mem_limit inter_op_thread_count "
    "intra_op_thread_count level memory.enable_memory_arena_shrinkage session.disable_prepacking "
    "session.inter_op.allow_spinning session.intra_op.allow_spinning session.use_device_allocator_for_initializers use_tf32",
    "tensorrt": "execution_context_allocation_strategy",
    "openvino": "COMPILATION_NUM_THREADS CPU_THREADS_NUM CPU_THROUGHPUT_STREAMS ENABLE_BATCH_PADDING ENFORCE_BF16 HINT_BF16 "
    "INFERENCE_NUM_THREADS NUM_STREAMS PERFORMANCE_HINT RESHAPE_IO_LAYERS SKIP_OV_DYNAMIC_BATCHSIZE",
    "fil": "algo blocks_per_sm chunk_size is_classifier model_type output_class predict_proba storage_type threads_per_tree "
    "threshold transfer_threshold use_experimental_optimizations xgboost_allow_unknown_field",
}


@pytest.mark.parametrize("backend", sorted(NAMES))
def test_what_a_backend_calls_its_parameters(backend: str) -> None:
    """A name that is another is refused, or passed on unread to a program's code."""
    assert sorted(BACKENDS[backend].parameters) == NAMES[backend].split()
