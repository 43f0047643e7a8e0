"""What is answered for a model at zero without a cold start.

It is ready: what comes is served, if a little later, and clients that look before they ask would never ask. Its metadata
is what a replica has answered last; before that, and for what changes (statistics), the answer is "not now".
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from proxy.activator.throttler import TIMED_OUT
from proxy.downstream.grpc.local import Answerable, LocalAnswers
from proxy.downstream.rest.downstream import RestDownstream
from proxy.policy.refusal import NotServed, Refusal, in_grpc
from proxy.policy.routes import RestDecision, Route, Verdict
from proxy.request.grpc_head import CallKind
from proxy.request.messages import CONFIG, METADATA, MODEL_READY, STATISTICS
from proxy.request.replica import Replica
from proxy.upstream.queries import Answer
from proxy.wire import protobuf

AT_ZERO: Final = "the model is scaled to zero; a request for inference starts a replica"
# Of one answer that is remembered.
MOST_BYTES: Final = 256 * 1024
_ROUTES: Final[Mapping[Route | None, str]] = {Route.MODEL: "", Route.CONFIG: "/config"}
# ModelReadyResponse: ready=1.
_READY: Final = b"\x08\x01"
_ASKED_HERE: Final = frozenset({MODEL_READY, METADATA, CONFIG, STATISTICS})


class LastAnswers:
    """What a replica has answered about the model last, by path."""

    def __init__(self, model: str) -> None:
        self._model = f"/v2/models/{model}"
        self._answers: dict[str, bytes] = {}

    @property
    def paths(self) -> list[str]:
        """What a replica is asked."""
        return ["/v2", *(self._model + suffix for suffix in _ROUTES.values())]

    @property
    def ready_path(self) -> str:
        return f"{self._model}/ready"

    def remember(self, path: str, answer: Answer) -> None:
        if answer.status == 200 and len(answer.body) <= MOST_BYTES:
            self._answers[path] = answer.body

    def body(self, route: Route | None) -> bytes:
        """Raises NotServed."""
        suffix = _ROUTES.get(route)
        if suffix is None:
            raise NotServed(AT_ZERO)
        return self._answer(self._model + suffix)

    def server(self) -> Mapping[str, Any]:
        """Its metadata. Raises NotServed."""
        return self._read("/v2")

    def model(self) -> Mapping[str, Any]:
        """Its metadata. Raises NotServed."""
        return self._read(self._model)

    def versions(self) -> list[str]:
        """Those that were served; an empty one where that is not known."""
        try:
            found = self.model().get("versions")
        except NotServed:
            found = None
        return [str(version) for version in found] if isinstance(found, list) and found else [""]

    def _answer(self, path: str) -> bytes:
        body = self._answers.get(path)
        if body is None:
            raise NotServed(AT_ZERO)
        return body

    def _read(self, path: str) -> Mapping[str, Any]:
        try:
            data = json.loads(self._answer(path))
        except (ValueError, RecursionError) as error:
            raise NotServed(AT_ZERO) from error
        if not isinstance(data, dict):
            raise NotServed(AT_ZERO)
        return data


class AtZero:
    """Whether no replica serves, and what is answered then."""

    def __init__(self, answers: LastAnswers) -> None:
        self.answers = answers
        self.is_at_zero = True


class ActivatorRest(RestDownstream):
    """A downstream whose model may have no replica."""

    # A client that half-closes while its request is buffered has gone, as for Knative's activator.
    waits_for_half_closed = False
    overdue = TIMED_OUT
    at_zero: AtZero

    def own_answer(self, decision: RestDecision) -> tuple[int, bytes] | None:
        """Raises NotServed."""
        if not self.at_zero.is_at_zero:
            return None
        if decision.route is Route.MODEL_READY:
            return 200, b""
        if decision.version:  # what is remembered is of the version that would be served
            raise NotServed(AT_ZERO)
        return 200, self.at_zero.answers.body(decision.route)

    async def _versions(self) -> list[str]:
        return self.at_zero.answers.versions() if self.at_zero.is_at_zero else await super()._versions()

    async def own_statistics(self) -> tuple[int, bytes]:
        if self.at_zero.is_at_zero:
            raise NotServed(AT_ZERO)
        return await super().own_statistics()

    async def server_metadata(self) -> tuple[int, bytes]:
        if self.at_zero.is_at_zero:  # as a replica's own proxy has answered it
            return 200, json.dumps(self.at_zero.answers.server()).encode()
        return await super().server_metadata()


class RememberedQuestions:
    """A `local.Questions` of a model at zero."""

    def __init__(self, at_zero: AtZero) -> None:
        self._at_zero = at_zero

    async def versions(self, replica: Replica) -> list[str]:
        return self._at_zero.answers.versions()

    async def server_metadata(self) -> Mapping[str, Any]:
        """Raises NotServed."""
        metadata = self._at_zero.answers.server()
        extensions = metadata.get("extensions")
        return {
            "name": str(metadata.get("name", "")),
            "version": str(metadata.get("version", "")),
            "extensions": [str(one) for one in extensions] if isinstance(extensions, list) else [],
        }


class ActivatorAnswers(LocalAnswers):
    """The calls that are answered here, those included that a replica would answer if there were one."""

    def __init__(self, replica: Replica, at_zero: AtZero) -> None:
        super().__init__(replica, RememberedQuestions(at_zero), replica.not_ready)
        self._at_zero = at_zero

    def takes(self, kind: CallKind) -> bool:
        return self._at_zero.is_at_zero and kind.verdict is Verdict.ALLOW and kind.method in _ASKED_HERE

    def answer(self, call: Answerable, message: bytes) -> None:
        if not self.takes(call.kind):
            super().answer(call, message)
            return
        try:
            call.respond(self._at_zero_answer(call.kind.method))
        except Refusal as refusal:
            call.refuse(in_grpc(refusal))

    def _at_zero_answer(self, method: str) -> bytes:
        """Raises NotServed."""
        if method == MODEL_READY:
            return _READY if self._not_ready() is None else b""
        if method == METADATA:
            return model_metadata(self._at_zero.answers.model())
        raise NotServed(AT_ZERO)


def model_metadata(metadata: Mapping[str, Any]) -> bytes:
    """ModelMetadataResponse of REST's metadata: name=1, versions=2, platform=3, inputs=4, outputs=5; of a tensor
    name=1, datatype=2, shape=3 (grpc_service.proto). Raises NotServed where it is not that."""
    try:
        parts = [(1, str(metadata["name"]).encode())]
        parts += [(2, str(version).encode()) for version in metadata.get("versions", ())]
        parts.append((3, str(metadata.get("platform", "")).encode()))
        for number, member in ((4, "inputs"), (5, "outputs")):
            parts += [(number, _tensor(one)) for one in metadata.get(member, ())]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotServed(AT_ZERO) from error
    return b"".join(protobuf.encode_bytes(number, part) for number, part in parts)


def _tensor(tensor: Mapping[str, Any]) -> bytes:
    shape = b"".join(protobuf.encode_varint(int(size) & 0xFFFF_FFFF_FFFF_FFFF) for size in tensor["shape"])
    texts = ((1, tensor["name"]), (2, tensor["datatype"]))
    return b"".join(
        protobuf.encode_bytes(n, str(text).encode()) for n, text in texts
    ) + protobuf.encode_bytes(3, shape)
