"""`berth top`: GPUs, models, requested and measured memory of the cluster."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from berth.contract.keys import Keys
from berth.contract.quantity import format_bytes
from berth.contract.report import GpuReport, ModelReport
from berth.kube.client import KubeClient, open_client
from berth.kube.command import OutputOptions, console, plain
from berth.kube.errors import KubeError
from berth.runtime.errors import CannotStart
from berth.runtime.process import run_process
from binder.cache.view import NodeView
from binder.cli.snapshot import read_cluster
from binder.rules.gpu import NoGPU
from binder.rules.report import NoNodeReport, StaleNodeFacts, TritonNotReady, UnreadableNodeReport

SUMMARY = (
    "Show GPUs and models of the cluster: requested and measured memory, other use, reserved and free memory."
)


@dataclass(frozen=True, slots=True)
class GpuLine:
    """One GPU. None: the figure is not known."""

    index: int
    uuid: str
    product: str
    total_bytes: int | None
    other_use_bytes: int | None
    headroom_bytes: int
    reserved_bytes: int
    free_bytes: int | None
    healthy: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One pod's model, as its node reports it; of several GPUs the bytes are those of each."""

    pod: str
    model_id: str | None
    model_name: str | None
    gpu: str | None
    other_gpus: tuple[str, ...]
    requested_bytes: int
    measured_bytes: int | None
    state: str
    reason: str
    failure: str | None = None  # of a failed load, what it means for other nodes


@dataclass(frozen=True, slots=True)
class NodeLines:
    """One node. `problem` says why its figures must not be trusted, or is empty."""

    name: str
    problem: str
    gpus: tuple[GpuLine, ...]
    models: tuple[ModelLine, ...]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All nodes that have, or should have, an agent's report."""

    nodes: tuple[NodeLines, ...]

    def to_json(self) -> str:
        return json.dumps(_camel(dataclasses.asdict(self)), indent=2)


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth top`."""
    return run_process("top", SUMMARY, OutputOptions, main, argv)


async def main(options: OutputOptions, _: asyncio.Event) -> None:
    async with open_client(options.kubeconfig) as client:
        try:
            view = await collect(client, options.key_prefix, options.system_namespace)
        except KubeError as error:
            raise CannotStart(f"API server {client.host}: {error}") from error
    if options.output == "json":
        print(view.to_json())
    else:
        console().print(table(view))


async def collect(client: KubeClient, keys: Keys, namespace: str) -> ClusterView:
    """Read the cluster once. Raises KubeError."""
    cluster = await read_cluster(client, keys, namespace)
    views = (view for view in cluster.state.views() if _is_gpu_node(view))
    return ClusterView(tuple(_node(view, fresh=cluster.is_fresh(view.facts.name)) for view in views))


def table(view: ClusterView) -> RenderableType:
    """Two tables: GPUs and models."""
    gpus = Table(
        *("NODE", "GPU", "PRODUCT", "TOTAL", "OTHER USE", "HEADROOM", "RESERVED", "FREE", "STATE"),
        box=None,
        pad_edge=False,
    )
    models = Table("MODEL", "POD", "NODE", "GPU", "REQUESTED", "MEASURED", "STATE", box=None, pad_edge=False)
    for node in view.nodes:
        for gpu in node.gpus:
            gpus.add_row(*_gpu_row(node, gpu))
        if not node.gpus:
            gpus.add_row(plain(node.name), *["-"] * 7, plain(node.problem or NoGPU.name))
        for model in node.models:
            models.add_row(*_model_row(node, model))
    return Group(gpus, Text(""), models) if models.row_count else gpus


def _is_gpu_node(view: NodeView) -> bool:
    """An agent has reported on it, or a model pod is on it although none has."""
    return bool(view.facts.report or view.facts.report_error or view.reserved_anywhere)


def _node(view: NodeView, *, fresh: bool) -> NodeLines:
    report = view.facts.report
    return NodeLines(
        view.facts.name,
        _problem(view, fresh=fresh),
        () if report is None else tuple(_gpu(view, gpu, fresh=fresh) for gpu in report.gpus),
        () if report is None else tuple(_model(model) for model in report.models),
    )


def _problem(view: NodeView, *, fresh: bool) -> str:
    report = view.facts.report
    if report is None:
        error = view.facts.report_error
        return f"{UnreadableNodeReport.name}: {error}" if error else NoNodeReport.name
    if not fresh:
        return StaleNodeFacts.name
    return "" if report.triton.ready else TritonNotReady.name


def _gpu(view: NodeView, gpu: GpuReport, *, fresh: bool) -> GpuLine:
    """The last known figures; what is free now is not known from old ones."""
    return GpuLine(
        index=gpu.index,
        uuid=gpu.uuid,
        product=gpu.product,
        total_bytes=gpu.total_bytes,
        other_use_bytes=gpu.other_use_bytes,
        headroom_bytes=gpu.headroom_bytes,
        reserved_bytes=view.reserved_on(gpu.uuid),
        free_bytes=view.free_on(gpu) if fresh else None,
        healthy=gpu.healthy,
        reason=gpu.reason,
    )


def _model(model: ModelReport) -> ModelLine:
    return ModelLine(
        pod=f"{model.namespace}/{model.pod_name}" if model.pod_name else model.pod_uid,
        model_id=model.model_id,
        model_name=model.model_name,
        gpu=model.gpu,
        other_gpus=model.other_gpus,
        requested_bytes=model.requested_bytes,
        measured_bytes=model.measured_bytes,
        state=model.state.value,
        reason=model.reason,
        failure=None if model.failure is None else model.failure.value,
    )


def _gpu_row(node: NodeLines, gpu: GpuLine) -> list[Text]:
    state = node.problem or ("ok" if gpu.healthy else gpu.reason)
    figures = (gpu.total_bytes, gpu.other_use_bytes, gpu.headroom_bytes, gpu.reserved_bytes, gpu.free_bytes)
    return [plain(part) for part in (node.name, str(gpu.index), gpu.product, *map(_figure, figures), state)]


def _model_row(node: NodeLines, model: ModelLine) -> list[Text]:
    indexes = [str(gpu.index) for gpu in node.gpus if gpu.uuid in (model.gpu, *model.other_gpus)]
    parts = (
        model.model_name or "-",
        model.pod,
        node.name,
        ",".join(indexes) or "-",
        _on_each(model, model.requested_bytes),
        _on_each(model, model.measured_bytes),
        model.state if model.failure is None else f"{model.state} ({model.failure})",
    )
    return [plain(part) for part in parts]


def _on_each(model: ModelLine, count: int | None) -> str:
    gpus = 1 + len(model.other_gpus)
    return _figure(count) if gpus == 1 or count is None else f"{gpus} x {_figure(count)}"


def _figure(count: int | None) -> str:
    """What is not known is shown as unknown, never as 0."""
    return "?" if count is None else format_bytes(count)


def _camel(value: object) -> object:
    """Keys as Kubernetes writes them."""
    if isinstance(value, dict):
        return {_camel_key(key): _camel(inner) for key, inner in value.items()}
    return [_camel(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _camel_key(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(part.capitalize() for part in rest)
