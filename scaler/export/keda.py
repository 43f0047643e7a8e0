"""KEDA's external scaler: KEDA reads a model's figures and decides by itself.

The contract is that of protos/berth/v1/externalscaler.proto. A call says itself which namespace it is for, and KEDA says
the ScaledObject's own: a client that reaches the port reads the figures of any model, so only KEDA may reach it (by a
NetworkPolicy, by client certificates). Nothing can be changed here.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.contract.text import one_line
from berth.runtime.grpc_options import listen_on, server_options
from berth.v1 import externalscaler_pb2 as pb
from berth.v1.externalscaler_pb2_grpc import ExternalScalerServicer, add_ExternalScalerServicer_to_server
from scaler.core.models_view import ModelsView, ModelView
from scaler.export.figures import CONCURRENCY, FIGURES, figure, is_active, target_of
from scaler.export.tls import GrpcTls
from scaler.go import parse_float

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

# Of a ScaledObject: KEDA has two, and two more while it is replaced.
_STREAMS_OF_A_MODEL: Final = 8
_STREAMS: Final = 4096
_MESSAGE_BYTES: Final = 64 * 1024
_METADATA_BYTES: Final = 16 * 1024
_CONNECTIONS: Final = 256
_LARGEST: Final = float(2**53)


class NotServed(Exception):
    """A call that is refused: with a status, and a text for the ScaledObject's owner."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a ScaledObject requests. `target`: None where the model's annotations are to say it."""

    model: ModelKey
    metric: str
    target: float | None

    @property
    def metric_name(self) -> str:
        return f"berth-{self.metric}"


def trigger_of(ref: pb.ScaledObjectRef) -> Trigger:
    """Raises InvalidValue. What the metadata says beside is KEDA's."""
    said = ref.scalerMetadata
    name = said.get("model") or ref.name
    if "/" in name or not name or not ref.namespace:
        raise InvalidValue(
            f"model: {one_line(name, limit=100)!r} is invalid; use the name of a Deployment of the ScaledObject's"
            " namespace"
        )
    metric = said.get("metric") or CONCURRENCY
    if metric not in FIGURES:
        raise InvalidValue(f"metric: {one_line(metric, limit=100)!r} is invalid; use {', '.join(FIGURES)}")
    return Trigger(ModelKey(ref.namespace, name), metric, _target(said.get("target", "")))


def _target(text: str) -> float | None:
    if not text:
        return None
    try:
        target = parse_float(text)
    except InvalidValue:
        target = 0.0
    if not 0.001 <= target <= _LARGEST:
        raise InvalidValue(f"target: {one_line(text, limit=100)!r} is invalid; use a number from 0.001 on")
    return target


class KedaScaler(ExternalScalerServicer):
    """All calls are answered from what the view shows at this moment."""

    def __init__(self, models: ModelsView) -> None:
        self._models = models
        self._streams: dict[ModelKey, set[asyncio.Event]] = {}
        self._open = 0
        self._ended = False

    def look(self, changed: Iterable[ModelKey]) -> None:
        """These models may be shown otherwise than before: who watches one of them looks at it."""
        for model in changed:
            for stream in self._streams.get(model, ()):
                stream.set()

    def end(self) -> None:
        """Let all streams end in peace, so that KEDA comes back at once and finds who leads then."""
        self._ended = True
        self.look(list(self._streams))

    async def IsActive(self, ref: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:  # noqa: N802
        return await _answered(context, lambda: self._activity(_trigger(ref)))

    async def GetMetricSpec(self, ref: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:  # noqa: N802
        return await _answered(context, lambda: self._spec(_trigger(ref)))

    async def GetMetrics(self, asked: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:  # noqa: N802
        return await _answered(
            context, lambda: self._values(_trigger(asked.scaledObjectRef), asked.metricName)
        )

    async def StreamIsActive(  # noqa: N802
        self, ref: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        before = False
        async for answer in self._stream(ref, context, self._activity):
            if answer.result and not before:
                yield answer
            before = answer.result

    async def StreamMetricSpec(  # noqa: N802
        self, ref: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.GetMetricSpecResponse]:
        before = None
        async for answer in self._stream(ref, context, self._spec):
            if answer != before:
                yield answer
            before = answer

    async def _stream(
        self, ref: pb.ScaledObjectRef, context: Context, answer: Callable[[Trigger], T]
    ) -> AsyncIterator[T]:
        """At once, and whenever the model may be shown otherwise. What is not known for a while ends no stream."""
        trigger = await _answered(context, lambda: _trigger(ref))
        changed = await _answered(context, lambda: self._watch(trigger.model))
        # However it ends; an abandoned generator would end some time.
        context.add_done_callback(lambda _: self._unwatch(trigger.model, changed))  # type: ignore[arg-type]
        while not self._ended:
            changed.clear()
            try:
                current = answer(trigger)
            except NotServed as error:
                if error.code is not grpc.StatusCode.UNAVAILABLE or not self._models.leads:
                    await _refused(context, error)
            else:
                yield current
            await changed.wait()

    def _watch(self, model: ModelKey) -> asyncio.Event:
        """Raises NotServed where too many do."""
        streams = self._streams.get(model, set())
        if self._open >= _STREAMS or len(streams) >= _STREAMS_OF_A_MODEL:
            raise NotServed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._open} streams are open, {len(streams)} of them for {model}; at most {_STREAMS} and"
                f" {_STREAMS_OF_A_MODEL} may be",
            )
        changed = asyncio.Event()
        self._streams.setdefault(model, streams).add(changed)
        self._open += 1
        return changed

    def _unwatch(self, model: ModelKey, changed: asyncio.Event) -> None:
        streams = self._streams[model]
        streams.discard(changed)
        self._open -= 1
        if not streams:
            del self._streams[model]

    def _activity(self, trigger: Trigger) -> pb.IsActiveResponse:
        active = is_active(self._view(trigger.model))
        if active is None:
            raise _not_known(trigger.model)
        return pb.IsActiveResponse(result=active)

    def _spec(self, trigger: Trigger) -> pb.GetMetricSpecResponse:
        target = trigger.target or target_of(self._view(trigger.model), trigger.metric)
        if target is None:
            raise NotServed(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"target: how much of {trigger.metric} a replica of {trigger.model} is to have is said neither by the"
                " trigger nor by the Deployment's annotations; write it in the trigger's metadata",
            )
        spec = pb.MetricSpec(
            metricName=trigger.metric_name, targetSize=math.ceil(target), targetSizeFloat=target
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    def _values(self, trigger: Trigger, name: str) -> pb.GetMetricsResponse:
        if name and name != trigger.metric_name:
            raise NotServed(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the trigger's metric is {trigger.metric_name}, not {name!r}",
            )
        value = figure(self._view(trigger.model), trigger.metric)
        if value is None:
            raise _not_known(trigger.model)
        value = min(value, _LARGEST)
        found = pb.MetricValue(
            metricName=trigger.metric_name, metricValue=math.ceil(value), metricValueFloat=value
        )
        return pb.GetMetricsResponse(metricValues=[found])

    def _view(self, model: ModelKey) -> ModelView:
        if not self._models.leads:
            raise NotServed(grpc.StatusCode.UNAVAILABLE, "this replica does not lead; ask again")
        view = self._models.view(model)
        if view is None:
            raise NotServed(
                grpc.StatusCode.NOT_FOUND,
                f"no Deployment {model} has asked to be scaled: it lacks the annotation autoscaling.knative.dev/class",
            )
        return view


def _trigger(ref: pb.ScaledObjectRef) -> Trigger:
    try:
        return trigger_of(ref)
    except InvalidValue as error:
        raise NotServed(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None


def _not_known(model: ModelKey) -> NotServed:
    return NotServed(grpc.StatusCode.UNAVAILABLE, f"nothing is known of {model} yet; ask again")


async def _answered(context: Context, answer: Callable[[], T]) -> T:
    """What it answers, or the status of its refusal."""
    try:
        return answer()
    except NotServed as error:
        await _refused(context, error)


async def _refused(context: Context, error: NotServed) -> NoReturn:
    await context.abort(error.code, str(error))
    raise AssertionError("abort has raised")


async def serve(scaler: KedaScaler, listen: Endpoint, tls: GrpcTls | None) -> grpc.aio.Server:
    """Start the server. Raises CannotStart where the port is taken."""
    server = grpc.aio.server(
        options=server_options(
            message_bytes=_MESSAGE_BYTES,
            metadata_bytes=_METADATA_BYTES,
            connections=_CONNECTIONS,
            every_seconds=30,
            within_seconds=10,
            idle_seconds=None,
        ),
        maximum_concurrent_rpcs=_STREAMS + 256,
    )
    add_ExternalScalerServicer_to_server(scaler, server)  # type: ignore[no-untyped-call]
    credentials = None if tls is None else tls.credentials()
    await listen_on(server, listen, flag="--keda-listen", credentials=credentials)
    return server
