"""Streams of files: judged, written, published, refused."""

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

import agent.api
import agent.stage
import agent.stage_queue
from agent.admission import Admitted, NodeRules
from agent.disk_space import DiskSpace
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.contract.report import CodeRule, Failure, ModelState
from berth.triton.admin import IndexState
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_api import (
    CHUNK,
    COMMIT,
    DIGEST,
    FILE,
    HEADER,
    CallingPod,
    Context,
    Refused,
    api_for,
    commit,
    digest_of,
    file,
    header,
    manifest,
    outcome,
    sent,
    staged,
    stream,
)
from tests.fakes.agent_node import Node, on_server
from tests.fakes.objects import GIB


async def test_a_restarted_loader_may_stage_the_same_name_again(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    knows.caller, api = "anonymous", api_for(node, knows)
    assert not (await staged(api, "mine")).already_staged
    assert (await staged(api, "mine", digest=DIGEST)).already_staged
    assert not (await staged(api, "mine")).already_staged
    assert list(node.repository.records()) == [on_server("anonymous", "mine")]


async def test_files_of_a_pod_that_is_gone_do_not_take_the_place_of_its_successors(tmp_path: Path) -> None:
    """A pod deleted by force is gone at once, and its loader goes on for a while."""
    node, knows = Node(tmp_path), CallingPod()
    api, begun, go_on = api_for(node, knows), asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[pb.StageRequest]:
        for part in (header("mine"), FILE, CHUNK):
            yield part
        begun.set()
        await go_on.wait()
        yield COMMIT

    knows.caller = "anonymous-1"
    old = asyncio.ensure_future(api.Stage(slowly(), Context()))
    await begun.wait()
    node.models.lose_pod(PodUid("anonymous-1"))
    (gone,) = node.models
    node.models.drop(gone)  # it has no files: nothing holds it any more
    knows.caller = "anonymous-2"
    await staged(api, "mine")
    assert (await outcome(api, "mine")).state == pb.MODEL_STATE_READY
    go_on.set()
    with pytest.raises(Refused, match="anonymous-1 is gone") as refused:
        await old
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    record = node.repository.record(on_server("anonymous-2", "mine"))
    assert record is not None
    assert record.pod.uid == "anonymous-2"
    assert node.triton.loaded[on_server("anonymous-2", "mine")] is IndexState.READY
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("parts", "code", "why"),
    [
        ((), "INVALID_ARGUMENT", "ended without a commit"),
        ((HEADER,), "INVALID_ARGUMENT", "ended without a commit"),
        ((HEADER, FILE, CHUNK), "INVALID_ARGUMENT", "ended without a commit"),
        ((FILE,), "INVALID_ARGUMENT", "file came where header was expected"),
        ((HEADER, HEADER), "INVALID_ARGUMENT", "header came where file or chunk or commit was expected"),
        ((HEADER, pb.StageRequest()), "INVALID_ARGUMENT", "an empty message came where"),
        ((HEADER, CHUNK), "INVALID_ARGUMENT", "before its file"),
        ((HEADER, COMMIT), "INVALID_ARGUMENT", "there is no file"),
        ((HEADER, file("../x")), "INVALID_ARGUMENT", "must be relative"),
        ((HEADER, file("x", 11)), "OUT_OF_RANGE", "10 bytes"),
        ((HEADER, FILE, COMMIT), "INVALID_ARGUMENT", "1 bytes shorter"),
        ((HEADER, FILE, CHUNK, CHUNK), "INVALID_ARGUMENT", "longer"),
        ((HEADER, file("1/z"), CHUNK, COMMIT), "DATA_LOSS", "not '"),
        ((header("a/b"),), "INVALID_ARGUMENT", "a/b"),
        ((header("other"),), "PERMISSION_DENIED", "may use model 'model-p1' only"),
    ],
)
async def test_a_stream_that_is_refused_says_why_and_leaves_nothing(
    tmp_path: Path, parts: tuple[pb.StageRequest, ...], code: str, why: str
) -> None:
    node, registry = Node(tmp_path), CollectorRegistry()
    api = api_for(node, registry=registry)
    for _ in range(5):  # more often than stages go on at once: each gives its place back
        with pytest.raises(Refused, match=why) as refused:
            await sent(api, *parts)
        assert refused.value.code.name == code
    assert list((tmp_path / "staging").iterdir()) == []
    assert node.repository.records() == {}
    assert registry.get_sample_value("berth_agent_calls_total", {"method": "Stage", "code": code}) == 5
    await sent(api, HEADER, FILE, CHUNK, COMMIT)
    assert list(node.repository.records()) == [on_server("p1")]
    assert registry.get_sample_value("berth_agent_staged_bytes_total") == 1
    assert registry.get_sample_value("berth_agent_calls_total", {"method": "Stage", "code": "OK"}) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_a_stage_that_is_given_up_at_any_moment_leaves_nothing(tmp_path: Path, seed: int) -> None:
    node, knows, chance = Node(tmp_path), CallingPod(), random.Random(seed)
    api = api_for(node, knows)

    async def slowly(uid: str) -> AsyncIterator[pb.StageRequest]:
        for part in (
            header(f"model-{uid}"),
            file("1/a", 4),
            pb.StageRequest(chunk=b"1234"),
            file("1/b", 5),
            COMMIT,
        ):
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            yield part

    for number in range(60):
        knows.caller = f"p{number}"
        call = asyncio.ensure_future(api.Stage(slowly(knows.caller), Context()))
        for _ in range(chance.randrange(25)):
            await asyncio.sleep(chance.choice((0, 0, 0.0003)))
        call.cancel()
        if chance.random() < 0.5:
            await asyncio.gather(call, return_exceptions=True)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(task, return_exceptions=True)
    assert list((tmp_path / "staging").iterdir()) == []
    assert api._stager._disk.reserved == (0, 0)
    assert not any(node.repository.records().values())
    for number in range(5):  # every slot is free
        knows.caller = f"q{number}"
        assert (await staged(api, f"model-q{number}")).files == 1


async def test_a_sender_that_falls_silent_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.stage, "_SENDER_SECONDS", 0.02)
    api, never = api_for(Node(tmp_path)), asyncio.Event()
    for _ in range(5):
        with pytest.raises(
            Refused, match=r"DEADLINE_EXCEEDED: the sender kept the agent waiting for more than 0\.02 s"
        ):
            await sent(api, HEADER, FILE, then=never)
    assert (await staged(api, "model-p1")).files == 1


async def test_a_sender_pays_for_each_message_however_fast_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.stage, "_SENDER_SECONDS", 0.5)
    count = 0

    async def nothing() -> AsyncIterator[pb.StageRequest]:
        nonlocal count
        yield HEADER
        yield FILE
        while True:
            count += 1
            yield pb.StageRequest(chunk=b"")

    with pytest.raises(Refused, match="DEADLINE_EXCEEDED"):
        await api_for(Node(tmp_path)).Stage(nothing(), Context())
    assert count < 600


async def test_a_call_that_is_given_up_while_its_directory_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, begun, go_on = Node(tmp_path), threading.Event(), threading.Event()
    mkdir = Path.mkdir

    def slowly(self: Path, *args: Any, **more: Any) -> None:
        if self.parent.name == "staging":
            begun.set()
            go_on.wait(5)
        mkdir(self, *args, **more)

    monkeypatch.setattr(Path, "mkdir", slowly)
    call = asyncio.ensure_future(staged(api_for(node), "model-p1"))
    await asyncio.to_thread(begun.wait, 5)
    call.cancel()
    asyncio.get_running_loop().call_later(0.02, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("header", "code", "failure", "why"),
    [
        (
            manifest('backend: "evil"', "1/model.py", "config.pbtxt"),
            "INVALID_ARGUMENT",
            Failure.INVALID_MODEL,
            "backend: 'evil' is not among what this node's Triton has: python",
        ),
        (
            manifest('backend: "python"', "1/weights", "config.pbtxt"),
            "INVALID_ARGUMENT",
            Failure.INVALID_MODEL,
            "1/model.py is needed, and not there",
        ),
        (manifest(None, "1/model.py", "../x"), "INVALID_ARGUMENT", None, "must be relative"),
        (manifest(None, "1/model.py"), "FAILED_PRECONDITION", Failure.CAPACITY, "this node takes none"),
    ],
)
async def test_a_model_that_is_not_taken_is_refused_before_its_bytes_have_moved(
    tmp_path: Path, header: pb.StageRequest, code: str, failure: Failure | None, why: str
) -> None:
    node = Node(tmp_path, code=CodeRule.NONE)
    moved = 0

    async def stream() -> AsyncIterator[pb.StageRequest]:
        nonlocal moved
        yield header
        for _ in range(1000):
            moved += 1
            yield FILE

    with pytest.raises(Refused, match=why) as refused:
        await api_for(node).Stage(stream(), Context())
    assert refused.value.code.name == code
    assert moved <= 10  # what was on its way is heard out
    model = node.models.get(PodUid("p1"))
    assert model is not None
    assert model.failure is failure
    if failure is not None:  # the binder and the pod's owner learn of it
        assert (model.state, why in model.reason) == (ModelState.FAILED, True)
        assert "ModelLoadFailed" in [reason for reason, _ in node.events.said]


async def test_nobody_has_more_judged_than_it_may_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judgement takes up to a second of a core: a pod that requests many is held to its streams' rate."""
    monkeypatch.setattr(agent.stage_queue, "STAGE_BURST", 3.0)
    api, outcomes = api_for(Node(tmp_path)), []
    for _ in range(5):
        with pytest.raises(Refused) as refused:
            await sent(api, manifest('backend: "python"', "1/weights", "config.pbtxt"))
        outcomes.append(refused.value.code)
    assert outcomes == [grpc.StatusCode.INVALID_ARGUMENT] * 3 + [grpc.StatusCode.UNAVAILABLE] * 2


async def test_a_slow_disk_holds_up_no_judgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.stage, "_JUDGED_AT_ONCE", 1)
    api, write, held_up = api_for(Node(tmp_path)), agent.stage.write_anew, []

    def written(directory: Path, admitted: Admitted) -> None:
        held_up.append(api._stager._judging.locked())
        write(directory, admitted)

    monkeypatch.setattr(agent.stage, "write_anew", written)
    await staged(api, "model-p1")
    assert held_up == [False]


async def test_more_files_than_a_model_has_are_not_even_judged(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(Refused, match="100001 files are announced; a model has at most 100000") as refused:
        await sent(api_for(node), manifest('backend: "python"', *(f"1/{n}" for n in range(100_001))))
    assert refused.value.code is grpc.StatusCode.OUT_OF_RANGE
    assert node.repository.records() == {}


async def test_a_stream_that_has_no_slot_yet_is_not_read(tmp_path: Path) -> None:
    """node D2: a header takes memory, of which each stream that is served may have some, and no other."""
    api = api_for(Node(tmp_path))
    read = asyncio.Event()

    async def stream() -> AsyncIterator[pb.StageRequest]:
        read.set()
        yield HEADER

    async with AsyncExitStack() as stack:
        for at in range(agent.stage_queue.SLOTS // 2):
            await stack.enter_async_context(
                api._stager._queue.slot(PodRef("team", f"o{at}", PodUid(f"o{at}")))
            )
        waits = asyncio.ensure_future(api.Stage(stream(), Context()))
        async with asyncio.timeout(20):
            while not api._stager._queue.waiting:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        assert not read.is_set()
    with pytest.raises(Refused, match="ended without a commit"):
        await waits
    assert read.is_set()


class Weak:
    """A message of which can be told whether anybody keeps it: what it wraps cannot be referred to weakly."""

    def __init__(self, message: pb.StageHeader) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


async def test_a_header_that_is_refused_is_kept_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """node D2: not until a late collection: a header of many files is large."""
    kept: list[Callable[[], Weak | None]] = []

    async def part(requests: AsyncIterator[pb.StageRequest], *_: str, within: float) -> Any:
        one = Weak((await anext(requests)).header)
        kept.append(weakref.ref(one))
        return SimpleNamespace(header=one)

    class AtTheEnd(Context):
        async def abort(self, code: Any, details: str, trailing: Any = ()) -> None:
            async with asyncio.timeout(20):  # the thread that has judged it lets go of it a moment later
                while any(one() is not None for one in kept):
                    await asyncio.sleep(0.005)
            await super().abort(code, details, trailing)

    monkeypatch.setattr(agent.stage, "_next_part", part)
    gc.disable()
    try:
        with pytest.raises(Refused, match="is not among"):
            parts = manifest('backend: "evil"', "1/model.py", "config.pbtxt")
            await api_for(Node(tmp_path)).Stage(stream(parts), AtTheEnd())
    finally:
        gc.enable()
    assert len(kept) == 1


async def test_what_was_announced_is_judged_again_when_it_is_there(tmp_path: Path) -> None:
    node = Node(tmp_path)
    other = commit(digest_of([("1/other", b"y")]))
    with pytest.raises(Refused, match="no backend is named"):
        await sent(api_for(node), manifest(None, "1/model.py"), file("1/other"), CHUNK, other)
    assert node.repository.records() == {}
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_model_of_another_namespace_is_refused_beside_code_before_its_bytes_have_moved(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.gate.hold(PodUid("theirs"), "another", has_code=True)
    with pytest.raises(Refused, match="holds a model with code of another namespace"):
        await sent(api_for(node), manifest(None, "1/model.py"))
    node.gate.release(PodUid("theirs"))
    assert (await sent(api_for(node), manifest(None, "1/model.py"), FILE, CHUNK, COMMIT)).digest == DIGEST
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert record.code


async def test_what_a_tenant_wrote_is_not_what_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the name in it is overwritten, with one log line (ecosystem A5)."""
    caplog.set_level("INFO")
    node = Node(tmp_path)
    config = b'#x\nbackend: "python" name: "densenet"'
    api = api_for(node, max_model_bytes=1000)
    files = [("1/model.py", b"y"), ("config.pbtxt", config)]
    parts = [HEADER]
    for path, body in files:
        parts += [file(path, len(body)), pb.StageRequest(chunk=body)]
    assert (await sent(api, *parts, commit(digest_of(files)))).digest == digest_of(files)
    text = (tmp_path / "models" / on_server("p1") / "config.pbtxt").read_text()
    assert "#x" not in text
    assert 'backend: "python"' in text
    assert 'name: "model-p1"' in text
    told = [
        one for one in caplog.records if one.message.startswith("the name in config.pbtxt is overwritten")
    ]
    assert len(told) == 1


async def test_files_that_are_refused_take_nothing_from_a_model_that_serves(tmp_path: Path) -> None:
    node = Node(tmp_path)
    model = await node.stage("p1")
    await node.lifecycle.start_load(model)
    with pytest.raises(Refused, match="is not among"):
        await sent(api_for(node), manifest('backend: "evil"', "1/model.py"))
    assert (model.state, model.failure) == (ModelState.READY, None)


async def test_files_of_a_pod_that_is_gone_are_nobody_elses_though_they_are_the_same(tmp_path: Path) -> None:
    node = Node(tmp_path)
    before = await node.stage("p9", name="model-p1", digest=DIGEST)
    node.models.drop(before)
    assert not (await staged(api_for(node), "model-p1", digest=DIGEST)).already_staged
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert record.pod.uid == "p1"


async def test_a_record_says_whether_triton_runs_code_of_the_model(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.admission.rules = NodeRules(frozenset({"onnxruntime"}), CodeRule.NAMESPACE)
    whole = commit(digest_of([("1/model.onnx", b"y")]))
    await sent(api_for(node), HEADER, file("1/model.onnx"), CHUNK, whole)
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert not record.code


async def test_what_the_node_keeps_free_is_not_filled_with_models(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="stay free for the node") as refused:
        await staged(api_for(Node(tmp_path), keep_free=1.0), "model-p1")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_pod_that_announces_the_whole_disk_keeps_a_window_of_it_from_the_others(
    tmp_path: Path,
) -> None:
    """node D3: a neighbour's model of one byte is staged while that stream is open and silent."""
    knows = CallingPod()
    api = api_for(Node(tmp_path), knows, max_model_bytes=1024 * GIB)
    api._stager._disk = DiskSpace(tmp_path, keep_share=0, statvfs=lambda _: _statvfs(bytes_free=50 * GIB))
    begun, release = asyncio.Event(), asyncio.Event()

    async def announced() -> AsyncIterator[pb.StageRequest]:
        yield HEADER
        yield file("1/model.py", 50 * GIB)
        begun.set()
        await release.wait()

    evil = asyncio.ensure_future(api.Stage(announced(), Context()))
    await begun.wait()
    knows.caller = "p2"
    assert (await staged(api, "model-p2")).bytes == 1
    release.set()
    with pytest.raises(Refused, match="ended without a commit"):
        await evil
    assert api._stager._disk.reserved == (0, 0)


def _statvfs(*, bytes_free: int) -> Any:
    """Of a disk of 1 TiB."""
    return SimpleNamespace(
        f_frsize=4096, f_blocks=1024 * GIB // 4096, f_bavail=bytes_free // 4096, f_files=0, f_favail=0
    )
