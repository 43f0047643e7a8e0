"""The pods of a model's replicas as the activator knows them: which serve now, and which gets the next request.

A request that has its slot goes to a pod that has one too and stays there; one that was not sent yet when its pod turns
out to be gone goes to another, or waits for one.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from berth.contract.activation import ReplicaEndpoint
from berth.runtime.logs import fields
from proxy.activator.pod import Pod, PodParts
from proxy.activator.waiters import GrpcWaiter, RestWaiter, Waiter
from proxy.policy.refusal import NotServed
from proxy.upstream.grpc import GrpcRequest, UpstreamConnection
from proxy.upstream.http1 import HttpRequest, UpstreamHttp

log = logging.getLogger(__name__)


class RetryMeter(Protocol):
    """Counts requests that had their slot and wait for a pod again."""

    def retry_began(self, now: float) -> None: ...

    def retry_ended(self, now: float) -> None: ...


class Pods:
    """All pods of one model: a `http1.Pool` and a `triton.Upstreams`, and no other model's."""

    def __init__(
        self,
        parts: PodParts,
        changed: Callable[[], None],
        retries: RetryMeter,
        *,
        patience_seconds: float,
    ) -> None:
        """`changed`: which serve, or their slots. `patience_seconds`: for how long a request that had its slot waits for a
        pod again."""
        self._parts, self._changed, self._retries = parts, changed, retries
        self._pods: dict[tuple[str, str, int, int], Pod] = {}
        self._open: list[Pod] = []
        # Those that end the requests that they have.
        self._retired: set[Pod] = set()
        # By the request.
        self._waiters: dict[object, Waiter] = {}
        self.patience_seconds = patience_seconds
        self._round = 0
        self._next: Pod | None = None
        # Why no request is to wait for a pod.
        self.refusal: str | None = None

    def __iter__(self) -> Iterator[Pod]:
        return iter(list(self._pods.values()))

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def slots(self, activators: int) -> int:
        """Of those that serve, for one of so many activators."""
        return sum(max(1, pod.slots // activators) for pod in self._open)

    def assign(self, endpoints: Iterable[ReplicaEndpoint]) -> None:
        """These and no others."""
        assigned = {(one.uid, one.address, one.rest_port, one.grpc_port): one for one in endpoints}
        for key in self._pods.keys() - assigned.keys():
            pod = self._pods.pop(key)
            pod.retire()
            self._retired.add(pod)
        for key, endpoint in assigned.items():
            if key in self._pods:
                self._pods[key].update(endpoint)
            else:
                self._pods[key] = Pod(endpoint, self._parts, self._pod_changed)
        self._find_open()

    def refuse(self, reason: str | None) -> None:
        """No request is to wait for a pod, and why; None: requests may wait."""
        self.refusal = reason
        if reason is not None:
            for waiter in self._take_waiters():
                waiter.give_up(reason)

    def _pod_changed(self, pod: Pod) -> None:
        log.info("a pod opened" if pod.is_open else "a pod closed", extra=fields(pod=pod.endpoint.name))
        self._find_open()

    def _find_open(self) -> None:
        self._open = [pod for pod in self._pods.values() if pod.is_open]
        self._next = None
        if self._open:
            for waiter in self._take_waiters():
                waiter.go_on()
        self._changed()

    def _take_waiters(self) -> list[Waiter]:
        waiters, self._waiters = list(self._waiters.values()), {}
        for _ in waiters:
            self._retries.retry_ended(time.monotonic())
        return waiters

    def probe_now(self) -> None:
        """A request waits."""
        for pod in self._pods.values():
            if not pod.is_open:
                pod.probe_now()

    # Which is next.

    def pick(self) -> Pod | None:
        """Of the next two in turn the one with more free slots; if they have none, of all the one with the most;
        and where none has any but for answers that are on their way, by what is left to be computed."""
        found = self._open
        if len(found) < 2:
            return found[0] if found else None
        self._round = place = (self._round + 1) % len(found)
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
        waiter = RestWaiter(self, request)
        if pod is None:
            self._wait(request, waiter)
        else:
            waiter.ask(pod)
        return None

    def retry(self, waiter: RestWaiter) -> None:
        """Its pod could not be reached."""
        if not waiter.wants_connection:
            return
        pod = self.pick()
        if pod is not None:
            waiter.ask(pod)
        elif self.refusal is not None:
            waiter.give_up(self.refusal)
        else:
            self._wait(waiter.request, waiter)

    def _wait(self, request: object, waiter: Waiter) -> None:
        if request not in self._waiters:
            waiter.since = time.monotonic()
            self._waiters[request] = waiter
            self._retries.retry_began(waiter.since)

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
        self._wait(call, GrpcWaiter(call))
        return None

    def tick(self, now: float) -> None:
        """Every second."""
        for pod in [*self._pods.values(), *self._retired]:
            pod.tick(now)
        self._retired = {pod for pod in self._retired if not pod.is_idle}
        for request, waiter in list(self._waiters.items()):
            is_late = now - waiter.since > self.patience_seconds
            if (is_late or not waiter.wants_connection) and self._waiters.pop(request, None) is not None:
                self._retries.retry_ended(now)
                if is_late:
                    waiter.give_up("no replica of the model has come")

    async def close(self) -> None:
        self._waiters.clear()
        for pod in [*self._pods.values(), *self._retired]:
            await pod.close()


def _free(pod: Pod) -> int:
    return pod.free


def _room(pod: Pod) -> int:
    return pod.room
