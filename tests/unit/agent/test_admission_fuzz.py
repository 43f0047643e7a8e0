"""Random changes to real configurations: whatever is taken says only what the table lets through, and reads
the same in Triton's own protobuf, as the JSON of the load and as the file."""

import random
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2 as pb

from agent.admission import Admitted, InvalidModel, ModelFiles, NodeRules, judge
from agent.admission.allow_list import TABLE
from agent.admission.verdicts import Inside, Many, Named, Number, Refused, Text
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule

RULES = NodeRules(frozenset({"python", "onnxruntime", "tensorrt", "openvino"}), CodeRule.ANY)
FILES = ModelFiles(
    {
        **{f"{n}/{name}": 9 for n in (1, 2, 7) for name in ("model.py", "model.onnx", "model.plan", "a")},
        **dict.fromkeys(("a", "warmup/a", "initial_state/a", "1/model.xml", "1/model.bin"), 9),
    }
)
REAL = [
    """backend: "python" max_batch_size: 8 input [ { name: "I" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
    output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] label_filename: "a" } ]
    instance_group [ { count: 2 kind: KIND_CPU } ] parameters { key: "k" value { string_value: "v" } }""",
    """platform: "onnxruntime_onnx" max_batch_size: 16 dynamic_batching { preferred_batch_size: [ 4, 8 ]
    max_queue_delay_microseconds: 100 priority_levels: 3 default_priority_level: 1 }
    optimization { graph { level: 1 } cuda { graphs: true graph_spec [ { batch_size: 1
      input { key: "I" value { dim: [ 3 ] } } } ] } }
    model_warmup [ { name: "w" batch_size: 1 inputs { key: "I" value { data_type: TYPE_FP32 dims: [ 3 ]
      zero_data: true } } } ] response_cache { enable: true }""",
    """backend: "tensorrt" max_batch_size: 4 instance_group [ { profile: [ "0" ] gpus: [ 0 ] }, { count: 3 } ]
    version_policy { specific { versions: [ 1, 7 ] } } cc_model_filenames { key: "8.6" value: "a" }""",
    """backend: "python" max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 8 }
    control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
    state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 2 ]
      initial_state { name: "z" data_type: TYPE_FP32 dims: [ 2 ] data_file: "a" } } ] }""",
]
INTEGERS = (
    0,
    1,
    2,
    7,
    64,
    65,
    4097,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
    -1,
    -2,
    -(2**31),
    -(2**63),
)
STRINGS = (
    "",
    "a",
    "I",
    "1",
    "8.6",
    "0",
    "../a",
    "/etc/passwd",
    "a/../../b",
    "a\\b",
    "a\nb",
    "x" * 70_000,
    "é",
    "a b",
    "$(id)",
)
REALS = (0.0, 1.5, -1.0, 1e30, float("inf"), float("nan"))


def scalar(field: FieldDescriptor, dice: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return dice.choice(STRINGS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return dice.choice([value.number for value in field.enum_type.values] + [99])
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return dice.choice(REALS)
    return dice.choice(INTEGERS)


def changed(message: Message, dice: random.Random) -> None:
    """Change one field somewhere below; some changes do not fit their type and are left out."""
    if not message.DESCRIPTOR.fields:
        return
    field = dice.choice(message.DESCRIPTOR.fields)
    target = getattr(message, field.name)
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            name = scalar(key, dice)
            if value.message_type is None:
                target[name] = scalar(value, dice)
            else:
                changed(target[name], dice)
        elif field.message_type is not None:
            one = (
                target
                if not field.is_repeated
                else dice.choice(list(target))
                if len(target)
                else target.add()
            )
            one.SetInParent()
            for _ in range(dice.randrange(3)):
                changed(one, dice)
        elif field.is_repeated:
            target.extend([scalar(field, dice)] * dice.choice((1, 2, 17, 300)))
        else:
            setattr(message, field.name, scalar(field, dice))
    except (ValueError, TypeError):
        return


def require_listed(message: Message) -> None:
    """Every field that is set has a verdict that takes it."""
    rules = TABLE[message.DESCRIPTOR.full_name.removeprefix("inference.")]
    for field, value in message.ListFields():
        rule = rules[field.name]
        assert not isinstance(rule, Refused), field.full_name
        values = (
            list(value.values())
            if isinstance(rule, Named)
            else list(value)
            if isinstance(rule, Many)
            else [value]
        )
        verdict = rule.value if isinstance(rule, Named) else rule.each if isinstance(rule, Many) else rule
        if isinstance(rule, (Named, Many)):
            assert len(values) <= rule.at_most
        for one in values:
            if isinstance(one, Message):
                require_listed(one)
            elif isinstance(verdict, Number):
                assert verdict.lowest <= one <= verdict.highest or one == verdict.also
            elif isinstance(verdict, Text):
                assert len(one) <= verdict.characters
            elif isinstance(verdict, Inside):
                assert not one.startswith("/")
                assert not {"..", ".", ""}.intersection(one.split("/"))


def outcome(text: bytes) -> Admitted | str:
    """What is admitted, or the reason why not: one line of a size that can be told."""
    try:
        return judge(text, FILES, ModelName("m"), RULES)
    except InvalidModel as error:
        reason = str(error)
    assert 0 < len(reason) < 1000
    assert "\n" not in reason
    return reason


@pytest.mark.parametrize("seed", range(8))
def test_what_is_taken_says_only_what_the_table_lets_through(seed: int) -> None:
    dice, taken, refused = random.Random(seed), 0, 0
    for _ in range(250):
        config = text_format.Parse(dice.choice(REAL), pb.ModelConfig())
        for _ in range(dice.randrange(4)):
            changed(config, dice)
        admitted = outcome(text_format.MessageToString(config).encode())
        if isinstance(admitted, str):
            refused += 1
            continue
        taken += 1
        require_listed(admitted.config)
        assert all(field.name != "runtime" for field, _ in admitted.config.ListFields())
        read = text_format.Parse(admitted.text(), pb.ModelConfig())
        assert read == admitted.config
        again = judge(admitted.text().encode(), FILES, ModelName("m"), RULES)
        assert again == admitted
        given = json_format.ParseDict(admitted.for_gpus([5], kind="KIND_GPU"), pb.ModelConfig())
        assert all(group.kind and list(group.gpus) in ([], [5]) for group in given.instance_group)
        for group in given.instance_group:
            del group.gpus[:]
        assert given == admitted.config
    assert min(taken, refused) > 20


@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")
@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_are_no_config_are_refused_in_one_line(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(300):
        text = bytearray(dice.choice(REAL).encode())
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(text))
            match dice.randrange(3):
                case 0:
                    text[at] = dice.randrange(256)
                case 1:
                    del text[at : at + dice.randrange(20)]
                case _:
                    text[at:at] = bytes(text[at : at + 30])
        outcome(bytes(text))
