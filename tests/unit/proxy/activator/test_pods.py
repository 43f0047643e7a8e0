"""Requests that are let go are spread over replicas: none has more at once than it takes, in whatever order things happen."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.activation import BufferLimits, ReplicaEndpoint
from proxy.activator import pods as module
from proxy.activator.bounds import Bounds, ProbeLoad
from proxy.activator.pod import Pod, PodParts
from proxy.activator.pods import Pods
from proxy.activator.throttler import Throttler
from proxy.request.load import LoadMeter
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import AnswerReaders
from proxy.upstream.http1 import UpstreamHttp, UpstreamPool
from proxy.wire.http1 import ResponseHead
from tests.fakes.data_plane import Wire

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone"
HEAD_BYTES = len(ANSWER) - 2


class Calls:
    """A replica's gRPC connection, as far as its places are counted by it."""

    has_room = is_usable = True
    transport = object()

    def __init__(self) -> None:
        self.codec, self.streams = self, dict[object, SimpleNamespace]()

    async def closed(self, reason: str) -> None: ...


class Rest:
    """A request over REST: it goes on in the step in which it is let go."""

    takes_chunks, whose = True, "own"

    def __init__(self, scene: "Scene") -> None:
        self._scene = scene
        self.upstream: UpstreamHttp | None = None
        self.wants_connection, self.left = True, ANSWER
        self.admission = scene.throttler.admit(0.0, self._granted)
        if self.admission.is_running:
            self._granted()

    def _granted(self) -> None:
        upstream = self._scene.pods.take(self)
        if upstream is not None:
            self.connected(upstream)

    def connected(self, upstream: UpstreamHttp) -> None:
        self.upstream = upstream
        self.wants_connection = False
        upstream.request_done = True
        pool: Any = upstream._pool
        self._scene.came(self, next(pod for pod in self._scene.pods if pod.rest is pool))

    def go_on(self) -> None:
        """A part of its answer comes, or all."""
        size = self._scene.rng.choice([HEAD_BYTES, len(ANSWER)])
        part, self.left = self.left[:size], self.left[size:]
        self._scene.computed(self, is_whole=not self.left)
        assert self.upstream is not None
        self.upstream.data_received(part)

    def answer_began(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        if self._scene.are_long:
            self.admission.has_run(1)

    def answer_data(self, data: bytes) -> None: ...

    def upstream_writable(self) -> None: ...

    def answer_whole(self, head: ResponseHead, data: bytes, start: int) -> None:
        self.answer_ended()

    def answer_ended(self) -> None:
        self.admission.release(0.0)

    def answer_broke(self, reason: str) -> None:
        raise AssertionError(reason)

    def later(self, do: Callable[[], None]) -> None:
        self._scene.later.append(do)


class Call:
    """A gRPC call: it goes on in a later step than the one in which it is let go."""

    def __init__(self, scene: "Scene") -> None:
        self._scene, self.wants_connection = scene, True
        self._streams: dict[object, SimpleNamespace] | None = None
        self.admission = scene.throttler.admit(0.0, self.connected)
        if self.admission.is_running:
            self._begin()

    def connected(self) -> None:
        self._scene.later.append(self._begin)

    def _begin(self) -> None:
        found: Any = self._scene.pods.connection(self)
        if found is None:
            return
        self.wants_connection, self._streams = False, found.streams
        found.streams[self] = SimpleNamespace(begun=False, local_done=True)
        self._scene.came(self, next(pod for pod in self._scene.pods if pod._grpc is found))

    def go_on(self) -> None:
        """A part of its answer comes, or all."""
        assert self._streams is not None
        stream = self._streams[self]
        is_whole = stream.begun or self._scene.rng.random() < 0.5
        self._scene.computed(self, is_whole=is_whole)
        if is_whole:
            del self._streams[self]
            self.admission.release(0.0)
        else:
            stream.begun = True
            if self._scene.are_long:
                self.admission.has_run(1)

    def answer_broke(self, reason: str) -> None:
        raise AssertionError(reason)


class Scene:
    """Some replicas of one model, and whoever asks."""

    def __init__(self, rng: random.Random, *, are_long: bool) -> None:
        """`are_long`: answers give their slot back as soon as they begin."""
        self.are_long = are_long
        self.rng, self.later = rng, list[Callable[[], None]]()
        meter = LoadMeter(0.0, lambda: 0.0)
        self.throttler = Throttler(meter, BufferLimits(), Bounds(), lambda: None, clock=lambda: 0.0)
        self.pods = Pods(
            PodParts(None, WriteBatch(), AnswerReaders(), ProbeLoad()),
            self._changed,
            self.throttler,
            patience_seconds=300.0,
        )
        # What replicas compute, and whose answer has begun to come.
        self.inside: dict[Any, Pod] = {}
        self.coming: list[Rest | Call] = []
        self.served = 0

    def _changed(self) -> None:
        self.throttler.allow(self.pods.slots(1))

    def opens(self, pod: Pod) -> None:
        pod._grpc = calls = Calls()  # type: ignore[assignment]
        pod._connections = {calls}  # type: ignore[arg-type]
        pod._set_open(True)

    def came(self, one: Rest | Call, pod: Pod) -> None:
        self.inside[one] = pod
        assert list(self.inside.values()).count(pod) <= pod.slots, f"one too many at {pod.endpoint.name}"

    def computed(self, one: Rest | Call, *, is_whole: bool) -> None:
        """Before its slot is given back."""
        if self.inside.pop(one, None) is None:
            self.coming.remove(one)
        if is_whole:
            self.served += 1
        else:
            self.coming.append(one)

    async def step(self) -> None:
        kind = self.rng.randrange(8)
        if kind == 0:
            self.rng.choice([Rest, Call])(self)
        elif kind <= 2 and (self.inside or self.coming):
            self.rng.choice([*self.inside, *self.coming]).go_on()
        elif kind == 3 and self.later:
            self.later.pop(0)()
        else:
            await asyncio.sleep(0)


async def _for_ever(self: Pod) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """No replica is asked whether it serves, and connections are made in some steps of the loop."""
    rng = random.Random()

    async def made(self: UpstreamPool, endpoint: Any) -> UpstreamHttp:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        upstream = UpstreamHttp(self, endpoint)
        upstream.connection_made(Wire())  # type: ignore[arg-type]
        return upstream

    monkeypatch.setattr(module.Pod, "_probe_forever", _for_ever)
    monkeypatch.setattr(UpstreamPool, "_connection", made)
    monkeypatch.setattr("proxy.upstream.http1.keep_alive", lambda transport: None)
    return rng


@pytest.mark.parametrize("are_long", [False, True])
@pytest.mark.parametrize("seed", range(25))
async def test_no_replica_computes_more_at_once_than_it_takes(
    unseen: random.Random, seed: int, are_long: bool
) -> None:
    unseen.seed(seed)
    scene = Scene(unseen, are_long=are_long)
    slots = {name: unseen.randrange(1, 5) for name in "pqr"}
    scene.pods.assign(
        ReplicaEndpoint(
            uid=name, name=name, address="10.0.0.1", rest_port=1, grpc_port=n, slots=count, ready=True
        )
        for n, (name, count) in enumerate(slots.items())
    )
    asked = [unseen.choice([Rest, Call])(scene) for _ in range(60)]
    for pod in scene.pods:
        for _ in range(unseen.randrange(20)):
            await scene.step()
        scene.opens(pod)
    for _ in range(1000):
        await scene.step()
    while scene.inside or scene.coming or scene.later or scene.throttler.buffered or scene.throttler.running:
        await scene.step()
    assert scene.served >= len(asked)
    assert all(pod.free == pod.slots for pod in scene.pods)
    await scene.pods.close()
