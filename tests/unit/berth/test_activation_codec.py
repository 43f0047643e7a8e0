"""The messages between scaler and activators are the same bytes on both ends, and what cannot be is not read."""

from typing import Any

import pytest

from berth.contract.activation import Assignment, BufferLimits, ReplicaEndpoint, Report, RouteMode
from berth.contract.activation_codec import (
    decode_assignment,
    decode_report,
    encode_assignment,
    encode_removal,
    encode_report,
)
from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.v1 import scaler_pb2 as pb

ASSIGNMENT = Assignment(
    version=7,
    model=ModelKey("a", "m"),
    public_name="m",
    mode=RouteMode.PROXY,
    rest_port=20000,
    grpc_port=20001,
    tls=True,
    endpoints=(
        ReplicaEndpoint(
            uid="u",
            name="p",
            address="10.0.0.1",
            rest_port=9000,
            grpc_port=9001,
            slots=4,
            ready=True,
            nearly_ready=True,
        ),
    ),
    limits=BufferLimits(requests=10, bytes=2048, seconds=1.5, cold_starts_per_second=2.0, cold_start_burst=3),
    clients=frozenset({"b", "a"}),
    unavailable="too large",
    waiting_for="a gate",
    activators=2,
)
REPORT = Report(
    version=7,
    model=ModelKey("a", "m"),
    buffered=3,
    average_buffered=2.5,
    arrived=4.0,
    forwarded=1.0,
    buffered_bytes=1024,
    oldest_seconds=0.5,
    cold_start=True,
    rest_port=20000,
    grpc_port=20001,
    served_ago=0.25,
)
# What scalers and activators of earlier releases say.
ASSIGNMENT_BYTES = (
    "08071201611a016d22016d280130a09c0138a19c0140014a1c0a01751201701a0831302e302e302e3120a84628a94630043801"
    "40015219080a10801019000000000000f83f21000000000000004028035a01615a01626209746f6f206c617267656802"
    "7a06612067617465"
)
REMOVAL_BYTES = "1201611a016d7001"
REPORT_BYTES = (
    "08071201611a016d200329000000000000044031000000000000104039000000000000f03f40800849000000000000e03f5001"
    "58a09c0160a19c0169000000000000d03f"
)


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (encode_assignment(ASSIGNMENT), ASSIGNMENT_BYTES),
        (encode_removal(ASSIGNMENT.model), REMOVAL_BYTES),
        (encode_report(REPORT), REPORT_BYTES),
    ],
)
def test_the_bytes_are_those_of_earlier_releases(message: Any, golden: str) -> None:
    assert message.SerializeToString(deterministic=True).hex() == golden


def test_what_one_end_writes_the_other_reads() -> None:
    assert decode_assignment(encode_assignment(ASSIGNMENT)) == ASSIGNMENT
    assert decode_report(encode_report(REPORT)) == REPORT


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": 0},
        {"mode": 3},
        {"public_name": ""},
        {"rest_port": 19999},
        {"grpc_port": 30000},
        {"grpc_port": 20000},
        {"namespace": ""},
        {"name": "x/y"},
        {"address": "example.com"},
        {"address": ""},
        {"endpoint_port": 65536},
    ],
)
def test_an_assignment_that_cannot_be_is_not_read(changes: dict[str, Any]) -> None:
    message = encode_assignment(ASSIGNMENT)
    for field, value in changes.items():
        if field == "address":
            message.endpoints[0].address = value
        elif field == "endpoint_port":
            message.endpoints[0].grpc_port = value
        else:
            setattr(message, field, value)
    with pytest.raises(InvalidValue):
        decode_assignment(message)


def test_a_port_of_a_replica_is_at_most_65535() -> None:
    message = encode_assignment(ASSIGNMENT)
    message.endpoints[0].rest_port = 65535
    assert decode_assignment(message).endpoints[0].rest_port == 65535


@pytest.mark.parametrize(
    "field", ["average_buffered", "arrived", "forwarded", "oldest_seconds", "served_ago"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1.1e9])
def test_a_figure_that_cannot_be_is_not_read(field: str, value: float) -> None:
    message = encode_report(REPORT)
    setattr(message, field, value)
    with pytest.raises(InvalidValue):
        decode_report(message)


def test_a_tenants_text_is_one_line_and_no_activator_divides_by_none() -> None:
    read = decode_assignment(
        pb.ModelAssignment(
            namespace="a",
            name="m",
            public_name="m",
            mode=pb.ROUTE_MODE_SERVE,
            unavailable="too\nlarge",
            waiting_for="a\r\ngate",
        )
    )
    assert (read.unavailable, read.waiting_for, read.activators) == ("too large", "a gate", 1)
