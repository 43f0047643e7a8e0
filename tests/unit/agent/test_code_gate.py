"""Whose code may be beside whose models."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from agent.admission import CodeGate, CodeRefused
from agent.repository import Record
from berth.contract.errors import InvalidValue
from berth.contract.ids import ModelName, PodUid, ServerName
from berth.contract.report import CodeReport, CodeRule, Failure, ModelState
from berth.triton.admin import IndexState
from tests.fakes.agent_node import GPU, Node

CODE = {"config.pbtxt": 'backend: "python"', "1/model.py": ""}
DATA = {"config.pbtxt": 'backend: "onnxruntime"', "1/model.onnx": "x"}


def taken(gate: CodeGate, uid: str, namespace: str, *, has_code: bool) -> bool:
    try:
        gate.claim(PodUid(uid), namespace, has_code=has_code)
    except CodeRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("rule", "first", "second", "allowed"),
    [
        (CodeRule.NONE, ("a", False), ("b", False), True),
        (CodeRule.NONE, ("a", False), ("a", True), False),
        (CodeRule.ANY, ("a", True), ("b", True), True),
        (CodeRule.NAMESPACE, ("a", False), ("b", False), True),
        (CodeRule.NAMESPACE, ("a", True), ("a", True), True),
        (CodeRule.NAMESPACE, ("a", True), ("a", False), True),
        (CodeRule.NAMESPACE, ("a", False), ("a", True), True),
        (CodeRule.NAMESPACE, ("a", True), ("b", True), False),
        (CodeRule.NAMESPACE, ("a", True), ("b", False), False),
        (CodeRule.NAMESPACE, ("a", False), ("b", True), False),
    ],
)
def test_who_may_be_beside_whom(
    rule: CodeRule, first: tuple[str, bool], second: tuple[str, bool], allowed: bool
) -> None:
    gate = CodeGate(rule)
    assert taken(gate, "1", first[0], has_code=first[1])
    assert taken(gate, "2", second[0], has_code=second[1]) is allowed
    gate.release(PodUid("1"))
    assert taken(gate, "2", second[0], has_code=second[1]) is (allowed or rule is not CodeRule.NONE)


def test_a_model_is_not_in_its_own_way_and_what_is_refused_is_not_counted() -> None:
    gate = CodeGate(CodeRule.NAMESPACE)
    assert taken(gate, "1", "a", has_code=True)
    assert taken(gate, "1", "a", has_code=False)
    assert gate.report() == CodeReport(CodeRule.NAMESPACE, None)
    assert taken(gate, "1", "a", has_code=True)
    assert gate.report() == CodeReport(CodeRule.NAMESPACE, "a")
    assert not taken(gate, "2", "b", has_code=True)
    gate.release(PodUid("1"))
    gate.release(PodUid("1"))
    assert gate.report() == CodeReport(CodeRule.NAMESPACE, None)
    assert taken(gate, "3", "c", has_code=False)


def test_what_an_agent_finds_is_held_whatever_the_rule_says_of_it() -> None:
    gate = CodeGate(CodeRule.NAMESPACE)
    gate.hold(PodUid("1"), "a", has_code=True)
    gate.hold(PodUid("2"), "b", has_code=True)
    assert not taken(gate, "3", "a", has_code=False)
    gate.release(PodUid("2"))
    assert taken(gate, "3", "a", has_code=False)


def test_a_refusal_names_no_other_tenant() -> None:
    gate = CodeGate(CodeRule.NAMESPACE)
    gate.claim(PodUid("uid-of-secret"), "secret", has_code=True)
    for has_code in (True, False):
        with pytest.raises(CodeRefused) as refused:
            gate.check(PodUid("2"), "b", has_code=has_code)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("seed", range(20))
def test_no_history_brings_code_beside_another_namespace(seed: int) -> None:
    gate, held, dice = CodeGate(CodeRule.NAMESPACE), {}, random.Random(seed)
    for _ in range(300):
        uid, namespace, has_code = f"p{dice.randrange(6)}", dice.choice("abc"), dice.random() < 0.5
        if dice.random() < 0.4:
            gate.release(PodUid(uid))
            held.pop(uid, None)
        elif taken(gate, uid, namespace, has_code=has_code):
            held[uid] = (namespace, has_code)
        if any(code for _, code in held.values()):
            assert len({namespace for namespace, _ in held.values()}) == 1


async def test_of_two_loads_at_once_one_is_refused_and_another_place_may_do(tmp_path: Path) -> None:
    node = Node(tmp_path)
    one = await node.stage("a", files=CODE, namespace="ns-a")
    two = await node.stage("b", files=CODE, namespace="ns-b", on="GPU-b")
    await asyncio.gather(node.lifecycle.start_load(one), node.lifecycle.start_load(two))
    states = sorted([(one.state, one.failure), (two.state, two.failure)], key=lambda pair: pair[0].value)
    assert states == [(ModelState.FAILED, Failure.CAPACITY), (ModelState.READY, None)]
    assert node.triton.most_loading == 1


async def test_a_place_is_free_for_another_namespace_once_the_model_is_gone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    one = await node.stage("a", files=CODE, namespace="ns-a")
    await node.lifecycle.start_load(one)
    assert node.gate.report().namespace == "ns-a"
    two = await node.stage("b", files=CODE, namespace="ns-b")
    await node.lifecycle.start_load(two)
    assert (two.state, two.failure) == (ModelState.FAILED, Failure.CAPACITY)
    assert "of another namespace" in two.reason
    assert "ns-a" not in two.reason
    node.models.lose_pod(one.ref.uid)
    assert one.server_name is not None
    await node.lifecycle.start_unload(one.server_name)
    assert node.gate.report().namespace is None
    await node.lifecycle.start_load(two)
    assert two.state is ModelState.READY


def test_beside_what_is_nobodys_nothing_begins() -> None:
    gate = CodeGate(CodeRule.NAMESPACE)
    gate.note_unowned(loaded=True)
    for has_code in (True, False):
        assert not taken(gate, "1", "a", has_code=has_code)
    gate.note_unowned(loaded=False)
    assert taken(gate, "1", "a", has_code=True)
    without_walls = CodeGate(CodeRule.ANY)
    without_walls.note_unowned(loaded=True)
    assert taken(without_walls, "1", "a", has_code=True)


async def test_a_model_without_a_record_counts_until_triton_is_rid_of_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    stranger = ServerName("stranger")
    node.repository.show(stranger)
    node.triton.loaded[stranger] = IndexState.READY
    model = await node.stage("a", files=CODE, namespace="ns-a")
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.CAPACITY)
    assert "owner is unknown" in model.reason
    await node.lifecycle.start_unload(stranger)
    await node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_a_load_that_fails_gives_its_claim_back(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.gpus.unknown = "no driver"
    one = await node.stage("a", files=CODE, namespace="ns-a")
    await node.lifecycle.start_load(one)
    assert one.state is ModelState.FAILED
    assert node.gate.report().namespace is None


async def test_code_that_a_node_takes_no_more_is_not_loaded_and_its_files_are_kept(tmp_path: Path) -> None:
    node = Node(tmp_path, code=CodeRule.NONE)
    model = await node.stage("a", files=CODE)  # an agent with another rule has let it in
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.CAPACITY)
    assert node.triton.loads == []
    assert list(node.repository.records()) == [model.server_name]


async def test_what_the_files_are_counts_and_not_what_their_record_says(tmp_path: Path) -> None:
    node = Node(tmp_path)
    one = await node.stage("a", files=CODE, namespace="ns-a")
    assert one.server_name is not None
    record = node.repository.record(one.server_name)
    assert record is not None
    file = node.repository.directory(one.server_name) / ".berth.json"
    file.write_text(replace(record, code=False).encode())
    await node.lifecycle.start_load(one)
    assert one.state is ModelState.READY
    assert node.gate.report().namespace == "ns-a"


async def test_code_that_triton_is_found_to_serve_keeps_other_namespaces_away(tmp_path: Path) -> None:
    """A load whose answer was lost, or that an agent before has begun."""
    node = Node(tmp_path)
    one = await node.stage("a", files=CODE, namespace="ns-a")
    assert one.server_name is not None
    node.triton.loaded[one.server_name] = IndexState.READY
    await node.lifecycle.start_load(one)
    two = await node.stage("b", files=CODE, namespace="ns-b", on="GPU-b")
    await node.lifecycle.start_load(two)
    assert (one.state, two.failure, node.triton.loads) == (ModelState.READY, Failure.CAPACITY, [])


def test_a_record_says_whether_there_is_code_and_an_older_one_that_there_may_be() -> None:
    from berth.contract.pod import PodRef

    record = Record(PodRef("a", "p", PodUid("u")), None, ModelName("m"), GPU, "d", code=False)
    assert Record.decode(record.encode()) == record
    older = record.encode().replace(', "code": false', "")
    assert older != record.encode()
    assert Record.decode(older).code
    with pytest.raises(InvalidValue):
        Record.decode(record.encode().replace('"code": false', '"code": "no"'))
