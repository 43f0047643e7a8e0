"""The node's DNS: what is asked, and what the answer holds."""

import socket
import struct

import pytest

from localcluster.node import names


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">6H", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1)


@pytest.mark.parametrize(
    ("name", "service"),
    [
        ("berth-scaler.berth-system.svc.cluster.local", ("berth-system", "berth-scaler")),
        ("Model.A.SVC.cluster.local", ("a", "model")),
        ("berth-scaler.berth-system.svc", None),
        ("berth-scaler.berth-system.svc.svc.cluster.local", None),
        ("cluster.local", None),
        ("example.com", None),
    ],
)
def test_only_a_services_full_name_is_one(name: str, service: tuple[str, str] | None) -> None:
    assert names.service_of(name) == service


def test_an_answer_repeats_the_question_and_has_the_address() -> None:
    asked = query("a.b.svc.cluster.local")
    found = names.answer(asked + b"what EDNS adds", "10.231.0.7")
    assert struct.unpack_from(">6H", found) == (77, 0x8580, 1, 1, 0, 0)
    assert found[12 : len(asked)] == asked[12:]
    assert found[-4:] == socket.inet_aton("10.231.0.7")


@pytest.mark.parametrize(("kind", "address", "code"), [(28, "10.231.0.7", 0), (1, None, 3)])
def test_no_address_of_another_kind_and_no_name_that_is_none(
    kind: int, address: str | None, code: int
) -> None:
    found = names.answer(query("a.b.svc.cluster.local", kind), address)
    assert struct.unpack_from(">6H", found) == (77, 0x8580 | code, 1, 0, 0, 0)
