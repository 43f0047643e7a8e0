"""Calls beside what the agent does by itself."""

import asyncio
import gc
import hashlib
import json
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

import agent.api
import agent.stage
import agent.stage_queue
from agent.admission import NodeRules
from agent.api import NodeAgentApi
from agent.auth import NotAllowed, PodGuard
from agent.disk_space import DiskSpace
from agent.gpus import GpuReading, GpusUnknown
from berth.contract.gateway import ticket_of
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid, ModelName, NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.contract.report import CodeRule, Failure, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.triton.admin import IndexState
from berth.triton.errors import TritonRefused, TritonUnavailable
from berth.v1 import node_agent_pb2 as pb
from tests.fakes import agent_api
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.objects import GIB, pod


class Knows:
    """Whoever calls is the pod `caller`, and lives here; an anonymous one if it is called so. `changes`: what
    is different about its pod, `gone`: it is no more, and admitted nowhere."""

    def __init__(self) -> None:
        self.caller, self.deleting, self.gone = "p1", False, False
        self.changes: dict[str, Any] = {}
        self.metadata: list[Mapping[str, str]] = []

    async def pod_of(self, metadata: Mapping[str, str], source: str) -> PodRef:
        self.metadata.append(metadata)
        return self._pod().ref

    async def admit(self, ref: PodRef) -> ModelPod:
        if self.gone:
            raise NotAllowed(f"pod {ref} has ended")
        return self._pod()

    async def current(self, ref: PodRef) -> ModelPod | None:
        return None if self.gone else self._pod()

    def _pod(self) -> ModelPod:
        marks = {Keys().model_id: None} if self.caller.startswith("anonymous") else {}
        found = pod(self.caller, **{"on": "n1", "choice": GPU, "annotations": marks, **self.changes})
        if self.deleting:
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return parse_model_pod(found, Keys())


class Refused(Exception):
    """The call ended with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Context:
    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        return self._metadata or None

    def peer(self) -> str:
        return "ipv4:10.0.0.9:5555"

    async def abort(self, code: Any, details: str, trailing: Any = ()) -> None:
        raise Refused(code, details)


def api_of(
    node: Node,
    knows: Knows | None = None,
    readings: Callable[[], tuple[GpuReading, ...]] | None = None,
    **more: Any,
) -> NodeAgentApi:
    knows = knows or Knows()
    return agent_api.api_of(node, knows, knows, readings=readings, **more)


async def outcome(api: NodeAgentApi, name: str = "model-p1") -> pb.LoadProgress:
    request = pb.LoadRequest(model_name=name)
    return [progress async for progress in api.Load(request, Context())][-1]


DIGEST = hashlib.sha256(b"1/model.py\0" + b"1\0" + b"y").hexdigest()


async def staged(api: NodeAgentApi, name: str, *, digest: str = "") -> pb.StageResponse:
    """Stage one file of one byte. `digest`: what the header says."""

    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name=name, digest=digest))
        yield pb.StageRequest(file=pb.StageFile(path="1/model.py", size=1))
        yield pb.StageRequest(chunk=b"y")
        yield pb.StageRequest(commit=pb.StageCommit(digest=DIGEST))

    return await api.Stage(parts(), Context())


async def watched(api: NodeAgentApi, name: str) -> list[pb.ModelStatus]:
    """What a watch says at once."""
    stream = api.WatchModel(pb.WatchModelRequest(model_name=name), Context())
    async for status in stream:
        await stream.aclose()
        return [status]
    return []


async def test_an_anonymous_pod_is_one_model_the_first_that_it_stages(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.caller, api = "anonymous", api_of(node, knows)
    # To ask for a name is not to take it.
    assert await watched(api, "typo") == []
    with pytest.raises(Refused, match="FAILED_PRECONDITION"):
        await outcome(api, "typo")
    await staged(api, "first")
    for other in ("second", "third"):
        for call in (
            staged(api, other),
            outcome(api, other),
            watched(api, other),
            api.Unload(pb.UnloadRequest(model_name=other), Context()),
        ):
            with pytest.raises(
                Refused, match=f"has model 'first'; it cannot have '{other}' as well"
            ) as refused:
                await call
            assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert list(node.repository.records()) == [on_server("anonymous", "first")]
    assert [status.model_name for status in await watched(api, "first")] == ["first"]
    assert (await outcome(api, "first")).state == pb.MODEL_STATE_READY


async def test_a_restarted_loader_may_stage_the_same_name_again(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.caller, api = "anonymous", api_of(node, knows)
    assert not (await staged(api, "mine")).already_staged
    assert (await staged(api, "mine", digest=DIGEST)).already_staged
    assert not (await staged(api, "mine")).already_staged
    assert list(node.repository.records()) == [on_server("anonymous", "mine")]


async def test_an_id_is_anothers_until_that_pod_and_its_model_are_gone(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.changes, api = {"annotations": {Keys().model_id: "mine"}}, api_of(node, knows)
    await staged(api, "mine")
    knows.caller = "p2"
    with pytest.raises(Refused, match="model id 'mine' on this node belongs to pod team/p1") as refused:
        await staged(api, "mine")
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
    node.models.lose_pod(PodUid("p1"))
    await node.lifecycle.start_unload(on_server("p1", "mine"))
    await staged(api, "mine")
    assert list(node.repository.records()) == [on_server("p2", "mine")]


async def test_a_name_is_anybodys_and_each_pod_is_served_by_its_own_files(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api = api_of(node, knows)
    for uid in ("anonymous-1", "anonymous-2"):
        knows.caller = uid
        await staged(api, "net")
        assert (await outcome(api, "net")).state == pb.MODEL_STATE_READY
    assert set(node.triton.held) == {on_server(uid, "net") for uid in ("anonymous-1", "anonymous-2")}
    assert [config["name"] for config in node.triton.configs] == node.triton.loads
    assert [status.model_name for status in await watched(api, "net")] == ["net"]
    assert all("-" not in message.rpartition(" ")[2] for _, message in node.events.said)


async def test_a_pod_that_nobody_has_placed_takes_no_name_whatever_it_asks(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.caller, knows.changes = "self-placed", {"choice": None}
    api = api_of(node, knows)
    for ask in (lambda: watched(api, "model-self-placed"), lambda: outcome(api, "model-self-placed")):
        with pytest.raises(Refused, match="has no GPU choice") as refused:
            await ask()
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert list(node.models) == []


def reading(uuid: str, index: int) -> GpuReading:
    return GpuReading(GpuUuid(uuid), index, "T4", GIB, 0, 0.0)


async def test_the_index_in_the_annotation_may_be_old(tmp_path: Path) -> None:
    node = Node(tmp_path)
    api = api_of(node, readings=lambda: (reading("GPU-z", 0), reading("GPU-a", 1)))
    await staged(api, "model-p1")
    assert list(node.repository.records()) == [on_server("p1")]


async def test_a_gpu_that_is_gone_is_told_to_the_pod_and_to_the_binder(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(Refused, match="was given GPU GPU-a, which this node does not have") as refused:
        await staged(api_of(node, readings=lambda: (reading("GPU-z", 0),)), "model-p1")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    (model,) = node.models
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    await staged(api_of(node), "model-p1")  # it is back
    assert model.failure is None


async def test_gpus_that_nobody_has_seen_yet_are_waited_for(tmp_path: Path) -> None:
    def unknown() -> tuple[GpuReading, ...]:
        raise GpusUnknown("NVML has not answered for 5 s")

    with pytest.raises(Refused, match="NVML has not answered") as refused:
        await staged(api_of(Node(tmp_path), readings=unknown), "model-p1")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_an_api_server_that_is_away_is_no_refusal(tmp_path: Path) -> None:
    """A loader asks again after UNAVAILABLE, and ends after anything else."""

    class Away(Knows):
        async def pod_of(self, metadata: Mapping[str, str], source: str) -> PodRef:
            raise error

    for error in (KubeUnreachable("connection refused"), response_error(503, "ServiceUnavailable", "later")):
        api = api_of(Node(tmp_path), Away())
        with pytest.raises(Refused, match=str(error)) as refused:
            await staged(api, "model-p1")
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_pod_that_goes_on_keeps_its_model_and_one_that_ends_does_not(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api = api_of(node, knows)
    await staged(api, "model-p1")
    await outcome(api)
    request = pb.UnloadRequest(model_name="model-p1")
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_KEPT
    assert list(node.repository.records()) == [on_server("p1")]
    knows.deleting = True  # the API server says so; the agent's own watch is behind
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    assert node.repository.records() == {}


async def test_no_model_is_unloaded_while_nobody_can_tell_whether_its_pod_ends(tmp_path: Path) -> None:
    class Away(Knows):
        async def current(self, ref: PodRef) -> ModelPod:
            raise KubeUnreachable("connection refused")

    node = Node(tmp_path)
    api = api_of(node, Away())
    await staged(api, "model-p1")
    await outcome(api)
    with pytest.raises(Refused, match="connection refused") as refused:
        await api.Unload(pb.UnloadRequest(model_name="model-p1"), Context())
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert list(node.repository.records()) == [on_server("p1")]
    assert list(node.triton.held) == [on_server("p1")]


async def test_a_model_that_is_too_large_is_not_a_full_disk(tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name="model-p1"))
        yield pb.StageRequest(file=pb.StageFile(path="1/model.py", size=11))

    with pytest.raises(Refused) as refused:
        await api_of(Node(tmp_path)).Stage(parts(), Context())
    assert refused.value.code is grpc.StatusCode.OUT_OF_RANGE


async def test_a_load_asked_for_while_one_is_failing_tells_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    model = await node.stage()
    node.triton.errors = [TritonRefused("unable to find backend tensorflow9")]
    remove = node.repository.remove

    def slowly(name: ModelName) -> None:
        remove(name)
        time.sleep(0.3)  # in its thread: the files are gone, and the failure is not yet told

    monkeypatch.setattr(node.repository, "remove", slowly)
    load = node.lifecycle.start_load(model)  # what the reconciler does by itself
    while list(node.repository.models.iterdir()):
        assert not load.done()
        await asyncio.sleep(0.01)
    progress = await outcome(api_of(node))
    assert progress.state == pb.MODEL_STATE_FAILED
    assert "tensorflow9" in progress.reason


async def test_a_load_asked_for_after_one_has_failed_tells_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.triton.errors = [TritonRefused("unable to find backend tensorflow9")]
    await node.lifecycle.start_load(await node.stage())
    assert "tensorflow9" in (await outcome(api_of(node))).reason


async def test_a_load_of_what_was_never_staged_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*has not been staged"):
        await outcome(api_of(Node(tmp_path)))


async def test_files_of_a_pod_that_is_gone_do_not_take_the_place_of_its_successors(tmp_path: Path) -> None:
    """A pod deleted by force is gone at once, and its loader goes on for a while."""
    node, knows = Node(tmp_path), Knows()
    api, begun, go_on = api_of(node, knows), asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name="mine"))
        yield pb.StageRequest(file=pb.StageFile(path="1/model.py", size=1))
        yield pb.StageRequest(chunk=b"y")
        begun.set()
        await go_on.wait()
        yield pb.StageRequest(commit=pb.StageCommit(digest=DIGEST))

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
    assert node.triton.held[on_server("anonymous-2", "mine")] is IndexState.READY
    assert list((tmp_path / "staging").iterdir()) == []


HEADER = pb.StageRequest(header=pb.StageHeader(model_name="model-p1"))
FILE = pb.StageRequest(file=pb.StageFile(path="1/model.py", size=1))
CHUNK, COMMIT = pb.StageRequest(chunk=b"y"), pb.StageRequest(commit=pb.StageCommit(digest=DIGEST))


async def sent(api: NodeAgentApi, *parts: pb.StageRequest, then: asyncio.Event | None = None) -> Any:
    """Stage these parts; `then` comes the end of the stream."""

    async def stream() -> AsyncIterator[pb.StageRequest]:
        for part in parts:
            yield part
        if then is not None:
            await then.wait()

    return await api.Stage(stream(), Context())


def file(path: str, size: int = 1) -> pb.StageRequest:
    return pb.StageRequest(file=pb.StageFile(path=path, size=size))


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
        ((pb.StageRequest(header=pb.StageHeader(model_name="a/b")),), "INVALID_ARGUMENT", "a/b"),
        (
            (pb.StageRequest(header=pb.StageHeader(model_name="other")),),
            "PERMISSION_DENIED",
            "may use model 'model-p1' only",
        ),
    ],
)
async def test_a_stream_that_is_refused_says_why_and_leaves_nothing(
    tmp_path: Path, parts: tuple[pb.StageRequest, ...], code: str, why: str
) -> None:
    node, registry = Node(tmp_path), CollectorRegistry()
    api = api_of(node, registry=registry)
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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"choice": None}, "has no GPU choice"),
        ({"mem": "2Gi"}, f"asks for {2 * GIB} bytes but was given {GIB}"),
        ({"annotations": {Keys().gpu_count: "2"}}, "asks for 2 GPUs but was given 1"),
        ({"mem": None}, "asks for no GPU memory"),
        # Placed by itself, past the binder, and asking for nothing.
        ({"mem": None, "choice": GpuChoice(GpuUuid("GPU-a"), 0, 0)}, "asks for no GPU memory"),
        ({"mem": "0", "choice": GpuChoice(GpuUuid("GPU-a"), 0, 0)}, "asks for no GPU memory"),
        (
            {"choice": GpuChoice(GpuUuid("GPU-elsewhere"), 0, GIB)},
            "was given GPU GPU-elsewhere, which this node",
        ),
    ],
)
async def test_a_pod_stages_only_what_the_binder_has_placed(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.changes = changes
    with pytest.raises(Refused, match=why) as refused:
        await staged(api_of(node, knows), "model-p1")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert node.repository.records() == {}


CHOICE: dict[str, Any] = {"v": 1, "uuid": "GPU-a", "index": 0, "bytes": GIB}


@pytest.mark.parametrize(
    "choice",
    [
        "",
        "null",
        "[" * 100_000,
        json.dumps(CHOICE | {"index": "0"}),
        json.dumps(CHOICE | {"index": -1}),
        json.dumps(CHOICE | {"index": 10**30}),
        json.dumps(CHOICE | {"bytes": float(GIB)}),
        json.dumps(CHOICE | {"bytes": True}),
        json.dumps(CHOICE | {"uuid": ["GPU-a"]}),
        json.dumps(CHOICE | {"uuid": None}),
        json.dumps(CHOICE | {"v": 2}),
        json.dumps(CHOICE | {"others": {}}),
        json.dumps(CHOICE | {"others": [{"uuid": "GPU-a", "index": 0}]}),
        json.dumps(CHOICE | {"x": "y" * 300_000}),
    ],
)
async def test_a_gpu_choice_that_is_nonsense_is_one_clear_refusal(tmp_path: Path, choice: str) -> None:
    """Of a live pod, through the guard that reads it."""

    class Kube:
        async def get(self, path: str) -> dict[str, Any]:
            return pod("p1", on="n1", choice=choice)

    node, knows = Node(tmp_path), Knows()
    knows.admit = PodGuard(Kube(), node=NodeName("n1"), keys=Keys()).admit  # type: ignore[arg-type, method-assign]
    with pytest.raises(
        Refused, match=r"PERMISSION_DENIED: pod team/p1: annotation seldon.io/trtis-gpu: "
    ) as no:
        await staged(api_of(node, knows), "model-p1")
    assert len(str(no.value)) < 1100
    assert node.repository.records() == {}


async def test_a_choice_that_is_moved_after_the_pod_was_seen_moves_nothing(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api = api_of(node, knows)
    await watched(api, "model-p1")  # the first that the agent sees of the pod holds
    moves = [
        GpuChoice(GpuUuid("GPU-b"), 1, GIB),
        GpuChoice(GpuUuid("GPU-a"), 0, 2 * GIB),
        GpuChoice(GpuUuid("GPU-a"), 0, GIB, (GpuRef(GpuUuid("GPU-b"), 1),)),
        None,
    ]

    async def refused_all() -> None:
        for moved in moves:
            knows.changes = {"choice": moved}
            for call in (staged(api, "model-p1"), outcome(api)):
                with pytest.raises(
                    Refused, match=r"pod team/p1: its GPU choice was .*GPU-a.* and holds"
                ) as refused:
                    await call
                assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        knows.changes = {}

    await refused_all()
    assert node.repository.records() == {}
    await staged(api, "model-p1")
    await refused_all()
    (model,) = node.models
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert record.gpu == model.gpu == GPU
    knows.changes = {"choice": GpuChoice(GpuUuid("GPU-a"), 7, GIB)}  # an index is of its day
    assert (await outcome(api)).state == pb.MODEL_STATE_READY
    knows.changes = {"choice": moves[0]}
    assert [status.gpu_uuid for status in await watched(api, "model-p1")] == ["GPU-a"]  # who serves goes on


@pytest.mark.parametrize("seed", range(3))
async def test_a_stage_that_is_given_up_at_any_moment_leaves_nothing(tmp_path: Path, seed: int) -> None:
    node, knows, chance = Node(tmp_path), Knows(), random.Random(seed)
    api = api_of(node, knows)

    async def slowly(uid: str) -> AsyncIterator[pb.StageRequest]:
        header = pb.StageRequest(header=pb.StageHeader(model_name=f"model-{uid}"))
        for part in (header, file("1/a", 4), pb.StageRequest(chunk=b"1234"), file("1/b", 5), COMMIT):
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
    api, never = api_of(Node(tmp_path)), asyncio.Event()
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
        await api_of(Node(tmp_path)).Stage(nothing(), Context())
    assert count < 600


async def test_four_stage_at_once_and_the_fifth_waits_for_one_to_end(tmp_path: Path) -> None:
    node, knows, never = Node(tmp_path), Knows(), asyncio.Event()
    api = api_of(node, knows)

    async def open_streams(count: int) -> None:
        async with asyncio.timeout(5):
            while len(list((tmp_path / "staging").iterdir())) != count:
                await asyncio.sleep(0.005)

    streams = []
    for number in range(4):
        knows.caller = f"p{number}"
        header = pb.StageRequest(header=pb.StageHeader(model_name=f"model-p{number}"))
        streams.append(asyncio.ensure_future(sent(api, header, FILE, then=never)))
        await open_streams(number + 1)
    knows.caller = "p5"
    fifth = asyncio.ensure_future(staged(api, "model-p5"))
    await asyncio.sleep(0.05)
    assert not fifth.done()
    streams[0].cancel()  # its client is gone
    assert (await fifth).files == 1
    await open_streams(3)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_disk_that_is_full_and_a_triton_that_is_away_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    api = api_of(node)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node.repository, "publish", full)
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED: .*No space left on device"):
            await staged(api, "model-p1")
    node.triton.index_errors = [TritonUnavailable("connection refused")]
    with pytest.raises(Refused, match="UNAVAILABLE: connection refused"):
        await staged(api, "model-p1")
    assert list((tmp_path / "staging").iterdir()) == []
    assert not any(node.repository.records().values())  # a directory of nobody, which the next pass removes


async def test_long_reasons_are_cut_for_the_wire(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.triton.index_errors = [TritonUnavailable("x" * 5000)]
    with pytest.raises(Refused) as refused:
        await staged(api_of(node), "model-p1")
    assert str(refused.value) == "UNAVAILABLE: " + "x" * 1000


async def test_callers_are_known_by_their_text_metadata(tmp_path: Path) -> None:
    knows = Knows()
    api = api_of(Node(tmp_path), knows)
    await api.ListModels(pb.ListModelsRequest(), Context(("authorization", "Bearer x"), ("trace-bin", b"\0")))
    await api.ListModels(pb.ListModelsRequest(), Context())
    assert knows.metadata == [{"authorization": "Bearer x"}, {}]


async def test_a_load_tells_each_state_on_its_way_and_the_class_of_a_failure(tmp_path: Path) -> None:
    node = Node(tmp_path)
    api, request = api_of(node), pb.LoadRequest(model_name="model-p1")
    await staged(api, "model-p1")
    node.triton.errors = [TritonRefused("CUDA out of memory")]
    told = [progress async for progress in api.Load(request, Context())]
    assert [progress.state for progress in told if progress.state != pb.MODEL_STATE_STAGED] == [
        pb.MODEL_STATE_LOADING,
        pb.MODEL_STATE_FAILED,
    ]
    assert (told[-1].reason, told[-1].failure_class) == ("CUDA out of memory", pb.FAILURE_CLASS_CAPACITY)
    # Its files are there: to ask again is to try again.
    told = [progress async for progress in api.Load(request, Context())]
    assert (told[-1].state, told[-1].reason, told[-1].failure_class) == (
        pb.MODEL_STATE_READY,
        "",
        pb.FAILURE_CLASS_UNSPECIFIED,
    )


async def test_a_watch_tells_each_change_how_to_reach_triton_and_ends_with_its_pod(tmp_path: Path) -> None:
    node, registry = Node(tmp_path), CollectorRegistry()
    api = api_of(node, registry=registry)
    await staged(api, "model-p1")
    (model,) = node.models
    watch = api.WatchModel(pb.WatchModelRequest(model_name="model-p1"), Context())
    first = await anext(watch)
    assert (first.model_name, first.state, first.gpu_uuid) == ("model-p1", pb.MODEL_STATE_STAGED, "GPU-a")
    assert (first.requested_bytes, first.HasField("measured_bytes")) == (GIB, False)
    assert first.gateway == pb.Gateway(endpoint="10.0.0.7:1", ticket=ticket_of(b"secret", "p1"))
    coming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.01)
    assert not coming.done()
    node.models.set(model, ModelState.FAILED, "so it is")
    said = await coming
    assert (said.state, said.reason) == (pb.MODEL_STATE_FAILED, "so it is")
    node.models.drop(model)
    assert [status async for status in watch] == []
    assert registry.get_sample_value("berth_agent_calls_total", {"method": "WatchModel", "code": "OK"}) == 1


async def test_a_model_that_serves_on_a_broken_gpu_is_told_as_failed_while_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    whole = GpuReading(GpuUuid("GPU-a"), 0, "T4", 16 * GIB, 0, 0.0)
    readings = [whole]
    api = api_of(node, readings=lambda: tuple(readings) if readings else unknown())
    await staged(api, "model-p1")
    await outcome(api)

    def unknown() -> tuple[GpuReading, ...]:
        raise GpusUnknown("no driver")

    async def told() -> tuple[str, str]:
        (status,) = await watched(api, "model-p1")
        return pb.ModelState.Name(status.state).removeprefix("MODEL_STATE_"), status.reason

    assert await told() == ("READY", "")
    readings[:] = [replace(whole, healthy=False, broken=True, reason="XID 79")]
    assert await told() == ("FAILED", "GPU 0 (GPU-a): XID 79")
    readings.clear()  # nobody can tell: Triton's word holds
    assert await told() == ("READY", "")
    readings[:] = [replace(whole, uuid=GpuUuid("GPU-b"))]
    assert await told() == ("FAILED", "GPU GPU-a is not on this node any more")
    (model,) = node.models
    node.models.set(model, ModelState.LOADING)  # the load itself will tell
    assert await told() == ("LOADING", "")


async def test_a_watch_repeats_itself_and_leaves_nobody_waiting_when_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.api, "_WATCH_REPEAT_SECONDS", 0.01)
    node = Node(tmp_path)
    api = api_of(node)
    await staged(api, "model-p1")
    before = asyncio.all_tasks()
    watch = api.WatchModel(pb.WatchModelRequest(model_name="model-p1"), Context())
    async with asyncio.timeout(5):
        first, again = await anext(watch), await anext(watch)
    assert first == again
    monkeypatch.setattr(agent.api, "_WATCH_REPEAT_SECONDS", 60)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_list_is_of_the_callers_own_model_and_tells_no_way_to_triton(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api = api_of(node, knows)
    await node.lifecycle.start_load(await node.stage())
    await node.stage("p2")
    (own,) = (await api.ListModels(pb.ListModelsRequest(), Context())).models
    assert (own.model_name, own.state, own.measured_bytes) == ("model-p1", pb.MODEL_STATE_READY, 3 * GIB)
    assert not own.HasField("gateway")
    knows.caller = "anonymous"  # which has none yet
    assert list((await api.ListModels(pb.ListModelsRequest(), Context())).models) == []


@pytest.mark.parametrize("asked", ["ListModels", "WatchModel", "Load", "Stage", "Unload"])
async def test_a_pod_that_has_ended_is_told_so_whatever_it_asks(tmp_path: Path, asked: str) -> None:
    node, knows, registry = Node(tmp_path), Knows(), CollectorRegistry()
    api, knows.gone = api_of(node, knows, registry=registry), True
    calls = {
        "ListModels": lambda: api.ListModels(pb.ListModelsRequest(), Context()),
        "WatchModel": lambda: watched(api, "model-p1"),
        "Load": lambda: outcome(api),
        "Stage": lambda: staged(api, "model-p1"),
        "Unload": lambda: api.Unload(pb.UnloadRequest(model_name="model-p1"), Context()),
    }
    with pytest.raises(Refused, match="has ended") as refused:
        await calls[asked]()  # type: ignore[no-untyped-call]
    code = refused.value.code.name
    assert code == "PERMISSION_DENIED"
    assert registry.get_sample_value("berth_agent_calls_total", {"method": asked, "code": code}) == 1
    assert list(node.models) == []


async def test_the_model_of_a_pod_that_is_gone_is_unloaded_by_its_own_last_word(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api, request = api_of(node, knows), pb.UnloadRequest(model_name="model-p1")
    await node.lifecycle.start_load(await node.stage())
    knows.gone = True
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    assert (list(node.models), node.repository.records()) == ([], {})


async def test_what_has_been_unloaded_may_be_unloaded_again(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api, request = api_of(node, knows), pb.UnloadRequest(model_name="model-p1")
    await node.stage()
    knows.deleting = True
    for _ in range(3):
        assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    with pytest.raises(Refused, match="INVALID_ARGUMENT"):
        await api.Unload(pb.UnloadRequest(model_name="a/b"), Context())
    with pytest.raises(Refused, match="may use model 'model-p1' only"):
        await api.Unload(pb.UnloadRequest(model_name="model-p2"), Context())


async def test_an_unload_goes_on_when_its_caller_has_gone(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api, knows.deleting = api_of(node, knows), True
    await node.stage()
    (model,) = node.models
    await node.lifecycle.start_load(model)
    call = asyncio.ensure_future(api.Unload(pb.UnloadRequest(model_name="model-p1"), Context()))
    async with asyncio.timeout(5):
        while model.state is not ModelState.UNLOADING:
            await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(5):
        while node.repository.records():
            await asyncio.sleep(0.001)


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
    call = asyncio.ensure_future(staged(api_of(node), "model-p1"))
    await asyncio.to_thread(begun.wait, 5)
    call.cancel()
    asyncio.get_running_loop().call_later(0.02, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert list((tmp_path / "staging").iterdir()) == []


def manifest(config: str | None, *paths: str, model: str = "model-p1") -> pb.StageRequest:
    header = pb.StageHeader(model_name=model, files=[pb.StageFile(path=path, size=1) for path in paths])
    if config is not None:
        header.config = config.encode()
    return pb.StageRequest(header=header)


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
        await api_of(node).Stage(stream(), Context())
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
    """A judgement takes up to a second of a core: a pod that asks for many is held to its streams' rate."""
    monkeypatch.setattr(agent.stage_queue, "STAGE_BURST", 3.0)
    api, outcomes = api_of(Node(tmp_path)), []
    for _ in range(5):
        with pytest.raises(Refused) as refused:
            await sent(api, manifest('backend: "python"', "1/weights", "config.pbtxt"))
        outcomes.append(refused.value.code)
    assert outcomes == [grpc.StatusCode.INVALID_ARGUMENT] * 3 + [grpc.StatusCode.UNAVAILABLE] * 2


async def test_more_files_than_a_model_has_are_not_even_judged(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(Refused, match="100001 files are announced; a model has at most 100000") as refused:
        await sent(api_of(node), manifest('backend: "python"', *(f"1/{n}" for n in range(100_001))))
    assert refused.value.code is grpc.StatusCode.OUT_OF_RANGE
    assert node.repository.records() == {}


async def test_a_stream_that_has_no_slot_yet_is_not_read(tmp_path: Path) -> None:
    """node D2: a header takes memory, of which each stream that is served may have some, and no other."""
    api = api_of(Node(tmp_path))
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
            while not api._stager._queue._waiting:
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
            await api_of(Node(tmp_path)).Stage(_stream(parts), AtTheEnd())
    finally:
        gc.enable()
    assert len(kept) == 1


async def _stream(*parts: pb.StageRequest) -> AsyncIterator[pb.StageRequest]:
    for one in parts:
        yield one


async def test_what_was_announced_is_judged_again_when_it_is_there(tmp_path: Path) -> None:
    node = Node(tmp_path)
    body = b"\x7fELF"
    parts = [
        manifest(None, "1/model.py"),
        pb.StageRequest(file=pb.StageFile(path="1/other", size=len(body))),
        pb.StageRequest(chunk=body),
        pb.StageRequest(commit=pb.StageCommit(digest=digest_of([("1/other", body)]))),
    ]
    with pytest.raises(Refused, match="no backend is named"):
        await sent(api_of(node), *parts)
    assert node.repository.records() == {}
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_model_of_another_namespace_is_refused_beside_code_before_its_bytes_have_moved(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.gate.hold(PodUid("theirs"), "another", has_code=True)
    with pytest.raises(Refused, match="holds a model with code of another namespace"):
        await sent(api_of(node), manifest(None, "1/model.py"))
    node.gate.release(PodUid("theirs"))
    assert (await sent(api_of(node), manifest(None, "1/model.py"), FILE, CHUNK, COMMIT)).digest == DIGEST
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
    api = api_of(node, max_model_bytes=1000)
    files = [("1/model.py", b"y"), ("config.pbtxt", config)]
    parts = [HEADER]
    for path, body in files:
        parts += [pb.StageRequest(file=pb.StageFile(path=path, size=len(body))), pb.StageRequest(chunk=body)]
    digest = digest_of(files)
    answer = await sent(api, *parts, pb.StageRequest(commit=pb.StageCommit(digest=digest)))
    assert answer.digest == digest
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
        await sent(api_of(node), manifest('backend: "evil"', "1/model.py"))
    assert (model.state, model.failure) == (ModelState.READY, None)


def digest_of(files: list[tuple[str, bytes]]) -> str:
    parts = (path.encode() + b"\0" + str(len(body)).encode() + b"\0" + body for path, body in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()


async def test_files_of_a_pod_that_is_gone_are_nobody_elses_though_they_are_the_same(tmp_path: Path) -> None:
    node = Node(tmp_path)
    before = await node.stage("p9", name="model-p1", digest=DIGEST)
    node.models.drop(before)
    assert not (await staged(api_of(node), "model-p1", digest=DIGEST)).already_staged
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert record.pod.uid == "p1"


async def test_a_record_says_whether_triton_runs_code_of_the_model(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.admission.rules = NodeRules(frozenset({"onnxruntime"}), CodeRule.NAMESPACE)

    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name="model-p1"))
        yield pb.StageRequest(file=pb.StageFile(path="1/model.onnx", size=1))
        yield pb.StageRequest(chunk=b"y")
        digest = hashlib.sha256(b"1/model.onnx\0" + b"1\0" + b"y").hexdigest()
        yield pb.StageRequest(commit=pb.StageCommit(digest=digest))

    await api_of(node).Stage(parts(), Context())
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert not record.code


async def test_refusals_do_not_fill_the_nodes_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    api = api_of(Node(tmp_path))
    with caplog.at_level("INFO"):
        for _ in range(200):
            with pytest.raises(Refused):
                await outcome(api, "another")
    assert 40 <= len([one for one in caplog.records if one.message == "call refused"]) < 100


async def test_what_the_node_keeps_free_is_not_filled_with_models(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="stay free for the node") as refused:
        await staged(api_of(Node(tmp_path), keep_free=1.0), "model-p1")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_pod_that_announces_the_whole_disk_keeps_a_window_of_it_from_the_others(
    tmp_path: Path,
) -> None:
    """node D3: a neighbour's model of one byte is staged while that stream is open and silent."""
    knows = Knows()
    api = api_of(Node(tmp_path), knows, max_model_bytes=1024 * GIB)
    api._stager._disk = DiskSpace(tmp_path, keep_share=0, statvfs=lambda _: _statvfs(bytes_free=50 * GIB))
    begun, release = asyncio.Event(), asyncio.Event()

    async def announced() -> AsyncIterator[pb.StageRequest]:
        yield HEADER
        yield pb.StageRequest(file=pb.StageFile(path="1/model.py", size=50 * GIB))
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
