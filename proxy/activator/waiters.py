"""Requests that have their slot and no connection yet: each waits for a pod, or goes to another when its pod cannot be
reached.
"""

from collections.abc import Callable
from typing import Protocol

from proxy.activator.pod import Pod
from proxy.policy.refusal import NotServed
from proxy.upstream.grpc import GrpcRequest
from proxy.upstream.http1 import HttpRequest, UpstreamHttp
from proxy.wire.http1 import ResponseHead


class Balancer(Protocol):
    """`proxy.activator.pods.Pods`, as far as it is needed here. `refusal`: why no request is to wait."""

    refusal: str | None

    def retry(self, waiter: "RestWaiter") -> None: ...


class RestWaiter:
    """It stands in for its request until that has a connection."""

    takes_chunks = False
    since = 0.0

    def __init__(self, balancer: Balancer, request: HttpRequest) -> None:
        self._balancer, self.request = balancer, request
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
        """A pod serves again."""
        self._balancer.retry(self)

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
        """Nothing of the request was sent: another pod can have it."""
        if self._balancer.refusal is not None:
            self.give_up(self._balancer.refusal)
            return
        if self._pod is not None:
            self._pod.could_not_be_reached()
        self._balancer.retry(self)

    def later(self, do: Callable[[], None]) -> None:
        self.request.later(do)

    def answer_began(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        """Nothing was asked yet."""

    def answer_whole(self, head: ResponseHead, data: bytes, start: int) -> None: ...

    def answer_data(self, data: bytes) -> None: ...

    def answer_ended(self) -> None: ...

    def upstream_writable(self) -> None: ...


class GrpcWaiter:
    since = 0.0

    def __init__(self, call: GrpcRequest) -> None:
        self._call = call

    @property
    def wants_connection(self) -> bool:
        return self._call.wants_connection

    def go_on(self) -> None:
        if self.wants_connection:
            self._call.connected()

    def give_up(self, reason: str) -> None:
        if self.wants_connection:
            self._call.answer_broke(reason)


Waiter = RestWaiter | GrpcWaiter
