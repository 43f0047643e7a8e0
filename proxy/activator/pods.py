"""A model's copies as the activator knows them: which may be asked now, and which is asked next.

A request that has its slot goes to a copy that has one too and stays there; one that has not gone yet when its
copy turns out to be gone goes to another, or waits for one.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from berth.contract.scaling import PodEndpoint
from berth.runtime.logs import fields
from proxy.activator.answers import Memory
from proxy.activator.hold import Looks
from proxy.activator.pod import Pod
from proxy.policy.refusal import NotServed
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import AnswerReaders, GrpcRequest, UpstreamConnection
from proxy.upstream.http1 import HttpRequest, UpstreamHttp
from proxy.wire.http1 import ResponseHead

log = logging.getLogger(__name__)


class Sought(Protocol):
    """Who counts those that wait for a copy again."""

    def seeks(self, now: float) -> None: ...

    def has_found(self, now: float) -> None: ...


class Pods:
    """All copies of one model: a `rest.upstream.Pool` and a `triton.Upstreams`, and no other model's."""

    def __init__(
        self,
        memory: Memory | None,
        turn: WriteBatch,
        readers: AnswerReaders,
        changed: Callable[[], None],
        sought: Sought,
        looks: Looks,
        *,
        patience_seconds: float,
    ) -> None:
        """`changed`: which are open, or their slots. `sought`: told of requests that had their slot and wait for a
        copy again, for so long at most. `looks`: of its namespace."""
        self._memory, self._turn, self._readers, self._looks = memory, turn, readers, looks
        self._changed, self._sought = changed, sought
        self._pods: dict[tuple[str, str, int, int], Pod] = {}
        self._open: list[Pod] = []
        # Those that end the requests that they have.
        self._retired: set[Pod] = set()
        # By whose they are.
        self._seekers: dict[object, _Seeker | _SeekingCall] = {}
        self.patience_seconds = patience_seconds
        self._turn_of = 0
        self._next: Pod | None = None
        # Why nobody is to wait for a copy.
        self.refusal: str | None = None

    def __iter__(self) -> Iterator[Pod]:
        return iter(list(self._pods.values()))

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def slots(self, share: int) -> int:
        """Of those that are open, of which this activator is one of so many that may use them."""
        return sum(max(1, pod.slots // share) for pod in self._open)

    def assign(self, endpoints: Iterable[PodEndpoint]) -> None:
        """These and no others."""
        told = {(one.uid, one.address, one.rest_port, one.grpc_port): one for one in endpoints}
        for key in self._pods.keys() - told.keys():
            pod = self._pods.pop(key)
            pod.retire()
            self._retired.add(pod)
        for key, one in told.items():
            if key in self._pods:
                self._pods[key].tell(one)
            else:
                self._pods[key] = self._pod(one)
        self._look_at_open()

    def _pod(self, told: PodEndpoint) -> Pod:
        return Pod(told, self._memory, self._turn, self._readers, self._pod_changed, self._looks)

    def refuse(self, reason: str | None) -> None:
        """Nobody is to wait for a copy, and why; None: whoever comes may wait."""
        self.refusal = reason
        if reason is not None:
            for seeker in self._take_seekers():
                seeker.give_up(reason)

    def _pod_changed(self, pod: Pod) -> None:
        log.info("a pod opened" if pod.is_open else "a pod closed", extra=fields(pod=pod.told.name))
        self._look_at_open()

    def _look_at_open(self) -> None:
        self._open = [pod for pod in self._pods.values() if pod.is_open]
        self._next = None
        if self._open:
            for seeker in self._take_seekers():
                seeker.go_on()
        self._changed()

    def _take_seekers(self) -> list["_Seeker | _SeekingCall"]:
        seekers, self._seekers = list(self._seekers.values()), {}
        for _ in seekers:
            self._sought.has_found(time.monotonic())
        return seekers

    def look_again(self) -> None:
        """Somebody waits."""
        for pod in self._pods.values():
            if not pod.is_open:
                pod.look_again()

    # Which is next.

    def pick(self) -> Pod | None:
        """Of the next two in turn the one with more free slots; if they have none, of all the one with the most;
        and where none has any but for answers that are on their way, by what is left to be computed."""
        found = self._open
        if len(found) < 2:
            return found[0] if found else None
        self._turn_of = place = (self._turn_of + 1) % len(found)
        pod, other = found[place], found[place - 1]
        free, others = pod.free, other.free
        if others > free:
            pod, free = other, others
        if free > 0:
            return pod
        pod = max(found, key=_free)
        return pod if pod.free > 0 else max(found, key=_room)

    # REST.

    @property
    def has_idle(self) -> bool:
        pod = self._next = self.pick()
        return pod is not None and pod.rest.has_idle

    def take_idle(self, request: HttpRequest) -> UpstreamHttp:
        assert self._next is not None, "has_idle has said so"
        return self._next.rest.take_idle(request)

    def take(self, request: HttpRequest) -> UpstreamHttp | None:
        """As UpstreamPool's. Raises NotServed."""
        if self.refusal is not None:
            raise NotServed(self.refusal)
        pod = self.pick()
        if pod is not None and pod.rest.has_idle:
            return pod.rest.take_idle(request)
        seeker = _Seeker(self, request)
        if pod is None:
            self._wait(request, seeker)
        else:
            seeker.ask(pod)
        return None

    def seek_again(self, seeker: "_Seeker") -> None:
        """Its copy could not be reached."""
        if not seeker.wants_connection:
            return
        pod = self.pick()
        if pod is not None:
            seeker.ask(pod)
        elif self.refusal is not None:
            seeker.give_up(self.refusal)
        else:
            self._wait(seeker.request, seeker)

    def _wait(self, whose: object, seeker: "_Seeker | _SeekingCall") -> None:
        if whose not in self._seekers:
            seeker.since = time.monotonic()
            self._seekers[whose] = seeker
            self._sought.seeks(seeker.since)

    # gRPC.

    def at_hand(self) -> UpstreamConnection | None:
        pod = self.pick()
        return None if pod is None else pod.at_hand()

    def connection(self, call: GrpcRequest) -> UpstreamConnection | None:
        """As `triton.Upstreams`'. Raises NotServed."""
        if self.refusal is not None:
            raise NotServed(self.refusal)
        while (pod := self.pick()) is not None:
            usable = pod.usable()
            if usable is not None:
                return usable
            pod.could_not_be_reached()  # it is none of the open ones any more
        self._wait(call, _SeekingCall(call))
        return None

    def tick(self, now: float) -> None:
        """Every second."""
        for pod in [*self._pods.values(), *self._retired]:
            pod.tick(now)
        self._retired = {pod for pod in self._retired if not pod.is_idle}
        for whose, seeker in list(self._seekers.items()):
            is_late = now - seeker.since > self.patience_seconds
            if (is_late or not seeker.wants_connection) and self._seekers.pop(whose, None) is not None:
                self._sought.has_found(now)
                if is_late:
                    seeker.give_up("no copy of the model has come")

    async def close(self) -> None:
        self._seekers.clear()
        for pod in [*self._pods.values(), *self._retired]:
            await pod.close()


def _free(pod: Pod) -> int:
    return pod.free


def _room(pod: Pod) -> int:
    return pod.room


class _Seeker:
    """A request that has its slot and no connection yet: it stands in for its request until it has one."""

    takes_chunks = False
    since = 0.0

    def __init__(self, pods: Pods, request: HttpRequest) -> None:
        self._pods, self.request = pods, request
        self._pod: Pod | None = None

    def ask(self, pod: Pod) -> None:
        self._pod = pod
        try:
            upstream = pod.rest.take(self)
        except NotServed as error:
            self.answer_broke(str(error))
            return
        if upstream is not None:
            self.connected(upstream)

    def go_on(self) -> None:
        """There is a copy again."""
        self._pods.seek_again(self)

    def give_up(self, reason: str) -> None:
        if self.wants_connection:
            self.request.answer_broke(reason)

    @property
    def whose(self) -> object:
        return self.request.whose

    @property
    def wants_connection(self) -> bool:
        return self.request.wants_connection

    def connected(self, upstream: UpstreamHttp) -> None:
        if not self.wants_connection:
            upstream.abort()
            return
        upstream.request = self.request
        self.request.connected(upstream)

    def answer_broke(self, reason: str) -> None:
        """Nothing of the request has gone: another copy can have it."""
        if self._pods.refusal is not None:
            self.give_up(self._pods.refusal)
            return
        if self._pod is not None:
            self._pod.could_not_be_reached()
        self._pods.seek_again(self)

    def later(self, do: Callable[[], None]) -> None:
        self.request.later(do)

    def answer_began(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        """Nothing was asked yet."""

    def answer_whole(self, head: ResponseHead, data: bytes, start: int) -> None: ...

    def answer_data(self, data: bytes) -> None: ...

    def answer_ended(self) -> None: ...

    def upstream_writable(self) -> None: ...


class _SeekingCall:
    """A call that has its slot and no copy."""

    since = 0.0

    def __init__(self, call: GrpcRequest) -> None:
        self._caller = call

    @property
    def wants_connection(self) -> bool:
        return self._caller.wants_connection

    def go_on(self) -> None:
        if self.wants_connection:
            self._caller.connected()

    def give_up(self, reason: str) -> None:
        if self.wants_connection:
            self._caller.answer_broke(reason)
