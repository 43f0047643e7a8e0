"""What is said of a model that sleeps, without waking it.

Whoever asks whether it is ready is told yes: what comes is served, if a little later, and clients that look before
they ask would never ask. Its metadata is told as a copy has told it last, while there was one; before that, and for
what changes (statistics), the answer is "not now".
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from proxy.activator.hold import OVERDUE
from proxy.downstream.grpc.local import Answerable, LocalAnswers
from proxy.downstream.rest.downstream import RestDownstream
from proxy.policy.refusal import NotServed, Refusal, in_grpc
from proxy.policy.routes import RestDecision, Route, Verdict
from proxy.request.grpc_head import CallKind
from proxy.request.messages import CONFIG, METADATA, MODEL_READY, STATISTICS
from proxy.request.replica import Replica
from proxy.upstream.queries import Answer
from proxy.wire import protobuf

ASLEEP: Final = "the model has no copy now; a request for inference wakes it"
# Of one answer that is remembered.
MOST_BYTES: Final = 256 * 1024
_ROUTES: Final[Mapping[Route | None, str]] = {Route.MODEL: "", Route.CONFIG: "/config"}
# ModelReadyResponse: ready=1.
_READY: Final = b"\x08\x01"
_ASKED_HERE: Final = frozenset({MODEL_READY, METADATA, CONFIG, STATISTICS})


class Memory:
    """What a copy has told of itself last: by path."""

    def __init__(self, model: str) -> None:
        self._model = f"/v2/models/{model}"
        self._answers: dict[str, bytes] = {}

    @property
    def paths(self) -> list[str]:
        """What is to be asked of a copy."""
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
            raise NotServed(ASLEEP)
        return self._told(self._model + suffix)

    def server(self) -> Mapping[str, Any]:
        """Its metadata. Raises NotServed."""
        return self._read("/v2")

    def model(self) -> Mapping[str, Any]:
        """Its metadata. Raises NotServed."""
        return self._read(self._model)

    def versions(self) -> list[str]:
        """Those that were served, of one that has told of none an empty one."""
        try:
            found = self.model().get("versions")
        except NotServed:
            found = None
        return [str(version) for version in found] if isinstance(found, list) and found else [""]

    def _told(self, path: str) -> bytes:
        body = self._answers.get(path)
        if body is None:
            raise NotServed(ASLEEP)
        return body

    def _read(self, path: str) -> Mapping[str, Any]:
        try:
            data = json.loads(self._told(path))
        except (ValueError, RecursionError) as error:
            raise NotServed(ASLEEP) from error
        if not isinstance(data, dict):
            raise NotServed(ASLEEP)
        return data


class Asleep:
    """Whether there is a copy to ask, and what is remembered if not."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.is_asleep = True


class HeldRest(RestDownstream):
    """A front whose model may have no copy."""

    # For so long nobody waits who may have gone: as with Knative's activator, that is what its end means.
    waits_for_half_closed = False
    overdue = OVERDUE
    asleep: Asleep

    def own_answer(self, decision: RestDecision) -> tuple[int, bytes] | None:
        """Raises NotServed."""
        if not self.asleep.is_asleep:
            return None
        if decision.route is Route.MODEL_READY:
            return 200, b""
        if decision.version:  # whatever is remembered is of the version that would be served
            raise NotServed(ASLEEP)
        return 200, self.asleep.memory.body(decision.route)

    async def _versions(self) -> list[str]:
        return self.asleep.memory.versions() if self.asleep.is_asleep else await super()._versions()

    async def own_statistics(self) -> tuple[int, bytes]:
        if self.asleep.is_asleep:
            raise NotServed(ASLEEP)
        return await super().own_statistics()

    async def server_metadata(self) -> tuple[int, bytes]:
        if self.asleep.is_asleep:  # as a copy's own proxy has told it
            return 200, json.dumps(self.asleep.memory.server()).encode()
        return await super().server_metadata()


class HeldQuestions:
    """What gRPC clients ask that is answered here: a `local.Questions`."""

    def __init__(self, asleep: Asleep) -> None:
        self._asleep = asleep

    async def versions(self, copy: Replica) -> list[str]:
        return self._asleep.memory.versions()

    async def server_metadata(self) -> Mapping[str, Any]:
        """Raises NotServed."""
        told = self._asleep.memory.server()
        extensions = told.get("extensions")
        return {
            "name": str(told.get("name", "")),
            "version": str(told.get("version", "")),
            "extensions": [str(one) for one in extensions] if isinstance(extensions, list) else [],
        }


class HeldAnswers(LocalAnswers):
    """The calls that are answered here, those too that a copy would answer if there were one."""

    def __init__(self, copy: Replica, asleep: Asleep) -> None:
        super().__init__(copy, HeldQuestions(asleep), copy.not_ready)
        self._asleep = asleep

    def takes(self, kind: CallKind) -> bool:
        return self._asleep.is_asleep and kind.verdict is Verdict.ALLOW and kind.method in _ASKED_HERE

    def answer(self, call: Answerable, message: bytes) -> None:
        if not self.takes(call.kind):
            super().answer(call, message)
            return
        try:
            call.respond(self._of_sleeping(call.kind.method))
        except Refusal as refusal:
            call.refuse(in_grpc(refusal))

    def _of_sleeping(self, method: str) -> bytes:
        """Raises NotServed."""
        if method == MODEL_READY:
            return _READY if self._not_ready() is None else b""
        if method == METADATA:
            return model_metadata(self._asleep.memory.model())
        raise NotServed(ASLEEP)


def model_metadata(told: Mapping[str, Any]) -> bytes:
    """ModelMetadataResponse of what REST says: name=1, versions=2, platform=3, inputs=4, outputs=5; of a tensor
    name=1, datatype=2, shape=3 (grpc_service.proto). Raises NotServed where it is not that."""
    try:
        parts = [(1, str(told["name"]).encode())]
        parts += [(2, str(version).encode()) for version in told.get("versions", ())]
        parts.append((3, str(told.get("platform", "")).encode()))
        for number, member in ((4, "inputs"), (5, "outputs")):
            parts += [(number, _tensor(one)) for one in told.get(member, ())]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotServed(ASLEEP) from error
    return b"".join(protobuf.encode_bytes(number, part) for number, part in parts)


def _tensor(told: Mapping[str, Any]) -> bytes:
    shape = b"".join(protobuf.encode_varint(int(size) & 0xFFFF_FFFF_FFFF_FFFF) for size in told["shape"])
    texts = ((1, told["name"]), (2, told["datatype"]))
    return b"".join(
        protobuf.encode_bytes(n, str(text).encode()) for n, text in texts
    ) + protobuf.encode_bytes(3, shape)
