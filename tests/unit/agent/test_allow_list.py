"""The allow-list against Triton's own descriptor."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import model_config_pb2 as pb

from agent.admission import InvalidModel
from agent.admission.allow_list import ITEM_BYTES, TABLE
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
    Understood,
    Written,
    written_anew,
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
    FieldDescriptor.CPPTYPE_STRING: (Text, Understood, Inside, Refused, Written),
    FieldDescriptor.CPPTYPE_BOOL: (Keep,),
    FieldDescriptor.CPPTYPE_ENUM: (OneOf, Refused),
    FieldDescriptor.CPPTYPE_FLOAT: (Real,),
    FieldDescriptor.CPPTYPE_DOUBLE: (Real,),
    FieldDescriptor.CPPTYPE_MESSAGE: (Parts, Refused),
}


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def parts_of(field: FieldDescriptor) -> Descriptor:
    assert field.message_type is not None
    return field.message_type


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
            key, value = parts_of(field).fields
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
                enum = MESSAGES[name].fields_by_name[field].enum_type
                assert enum is not None
                known = {value.number for value in enum.values}
                assert set(rule.numbers) <= known, (name, field)
    assert set(ITEM_BYTES) == {name for name in pb.DataType.keys() if name != "TYPE_INVALID"}  # noqa: SIM118


# What no field may say, whatever the table has for its bounds; many more than any field takes.
_MANY = 5000
_NO_TEXT = ["a\0b", "x" * 70_000]
_NO_REAL = [float("inf"), float("nan")]
_INTEGER_ENDS = {
    FieldDescriptor.CPPTYPE_INT32: [-(2**31), 2**31 - 1],
    FieldDescriptor.CPPTYPE_INT64: [-(2**63), 2**63 - 1],
    FieldDescriptor.CPPTYPE_UINT32: [2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [2**64 - 1],
}
# Any number of its type is harmless there, or the largest is.
_TAKES_ALL = {"inference.ModelSequenceBatching.Control.int32_false_true"}
_TAKES_THE_LARGEST = {
    "inference.ModelVersionPolicy.Specific.versions",
    "inference.ModelOptimizationPolicy.gather_kernel_buffer_threshold",
}


def never_taken(field: FieldDescriptor) -> list[Any]:
    """Single values of a field that hold no bound at all."""
    if field.full_name in _TAKES_ALL:
        return []
    if field.cpp_type in _INTEGER_ENDS:
        ends = _INTEGER_ENDS[field.cpp_type]
        return [end for end in ends if end < 0] if field.full_name in _TAKES_THE_LARGEST else ends
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return [*_NO_TEXT, "../x"] if "file" in field.name else _NO_TEXT
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return _NO_REAL
    return [99] if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM else []


def hostile(message: Descriptor, field: FieldDescriptor) -> Iterator[Message]:
    """The message with nothing in it but this field, beyond every bound."""
    rule, make = TABLE[message.full_name.removeprefix("inference.")][field.name], GetMessageClass(message)
    if isinstance(rule, Written):
        return
    if is_map(field):
        yield from hostile_maps(field, make)
    elif field.is_repeated:
        yield full(make(), field)
        if not isinstance(rule, Many) or not isinstance(rule.each, Written):
            yield from (make(**{field.name: [value]}) for value in never_taken(field))
    elif isinstance(rule, Refused) and field.message_type is not None:
        one = make()
        getattr(one, field.name).SetInParent()
        yield one
    else:
        yield from (make(**{field.name: value}) for value in never_taken(field))


def hostile_maps(field: FieldDescriptor, make: type[Message]) -> Iterator[Message]:
    key, value = parts_of(field).fields
    text = key.cpp_type == FieldDescriptor.CPPTYPE_STRING
    for keys in ([str(at) if text else at for at in range(1, _MANY)], *([one] for one in never_taken(key))):
        one = make()
        for each in keys:
            entry(one, field, each, None)
        yield one
    for hostile_value in never_taken(value):
        one = make()
        entry(one, field, "8.6" if field.name == "cc_model_filenames" else "a", hostile_value)
        yield one


def entry(one: Message, field: FieldDescriptor, key: Any, value: Any) -> None:
    entries = getattr(one, field.name)
    if parts_of(field).fields_by_name["value"].message_type is not None:
        entries[key].SetInParent()
    else:
        entries[key] = "x" if value is None else value


def full(one: Message, field: FieldDescriptor) -> Message:
    values = getattr(one, field.name)
    for _ in range(_MANY):
        values.add() if field.message_type is not None else values.append(default(field))
    return one


def default(field: FieldDescriptor) -> Any:
    return "1" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 1


@pytest.mark.parametrize(
    ("name", "field"), [(name, field.name) for name in sorted(MESSAGES) for field in MESSAGES[name].fields]
)
def test_each_field_has_bounds(name: str, field: str) -> None:
    """Turned off, whichever verdict it is, this fails."""
    for one in hostile(MESSAGES[name], MESSAGES[name].fields_by_name[field]):
        with pytest.raises(InvalidModel, match=f"^here: {field}"):
            written_anew(one, TABLE, where="here: ")
