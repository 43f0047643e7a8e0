"""The allow-list against Triton's own descriptor."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2 as pb

from agent.admission.table import ITEM_BYTES, TABLE
from agent.admission.verdicts import (
    Inside,
    Keep,
    Many,
    Named,
    Number,
    OneOf,
    Parts,
    Real,
    Refused,
    Text,
    Written,
)


def messages(top: Descriptor) -> Iterator[Descriptor]:
    """Every message that can be in a ModelConfig, but for the entries of maps."""
    seen, waiting = {top.full_name}, [top]
    while waiting:
        one = waiting.pop()
        if not one.GetOptions().map_entry:
            yield one
        for field in one.fields:
            if field.message_type is not None and field.message_type.full_name not in seen:
                seen.add(field.message_type.full_name)
                waiting.append(field.message_type)


MESSAGES = {one.full_name.removeprefix("inference."): one for one in messages(pb.ModelConfig.DESCRIPTOR)}
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
# Which verdicts say anything of a type of field.
FITTING: dict[int, tuple[type, ...]] = {
    **dict.fromkeys(INTEGERS, (Number, Refused, Written)),
    FieldDescriptor.CPPTYPE_STRING: (Text, Inside, Refused, Written),
    FieldDescriptor.CPPTYPE_BOOL: (Keep,),
    FieldDescriptor.CPPTYPE_ENUM: (OneOf, Refused),
    FieldDescriptor.CPPTYPE_FLOAT: (Real,),
    FieldDescriptor.CPPTYPE_DOUBLE: (Real,),
    FieldDescriptor.CPPTYPE_MESSAGE: (Parts, Refused),
}


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def test_every_field_of_every_message_has_a_verdict_and_nothing_else_has() -> None:
    assert {name: set(rules) for name, rules in TABLE.items()} == {
        name: {field.name for field in message.fields} for name, message in MESSAGES.items()
    }
    assert len(MESSAGES) > 40
    assert sum(len(message.fields) for message in MESSAGES.values()) > 150


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_each_verdict_is_one_on_its_fields_type(name: str) -> None:
    for field in MESSAGES[name].fields:
        rule = TABLE[name][field.name]
        if isinstance(rule, Refused):
            continue
        if is_map(field):
            assert isinstance(rule, Named), field.full_name
            key, value = field.message_type.fields
            assert isinstance(rule.key, FITTING[key.cpp_type]), field.full_name
            assert isinstance(rule.value, FITTING[value.cpp_type]), field.full_name
        elif field.is_repeated:
            assert isinstance(rule, Many), field.full_name
            assert isinstance(rule.each, FITTING[field.cpp_type]), field.full_name
        else:
            assert isinstance(rule, FITTING[field.cpp_type]), field.full_name


def test_what_names_a_file_stays_inside_or_is_refused() -> None:
    """By the words that Triton uses for it. `parameters` are the backends' and have lists of their own."""
    for name, message in MESSAGES.items():
        for field in message.fields:
            if any(word in field.name for word in ("filename", "_file", "path", "runtime", "library")):
                rule = TABLE[name][field.name]
                each = getattr(rule, "value", getattr(rule, "each", rule))
                assert isinstance(each, (Inside, Refused, Written)), field.full_name


def test_an_enum_is_taken_by_its_values_and_every_type_has_a_size() -> None:
    for name, rules in TABLE.items():
        for field, rule in rules.items():
            if isinstance(rule, OneOf):
                known = {value.number for value in MESSAGES[name].fields_by_name[field].enum_type.values}
                assert set(rule.numbers) <= known, (name, field)
    assert set(ITEM_BYTES) == {name for name in pb.DataType.keys() if name != "TYPE_INVALID"}  # noqa: SIM118
