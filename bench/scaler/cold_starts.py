"""How long a model's first request waits, by phase: on a local cluster, with every part as `deploy/` has it.

Each model is scaled to zero, is asked once, and is left alone; the next one follows when it has answered.

written   the API server shows `replicas` above 0      made      … a pod
bound     … with a node                                loaded    … whose loader has ended: the model is in Triton
answered  the last byte of the answer is here

`own` is all but what lies from bound to loaded: the controllers' share, the start of the sidecar's container and its process
are in it, as in a cluster they are not Berth's alone. What the API server shows is seen by watches of this process, which
is the kubelet and the client, too: every phase has their milliseconds.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from bench.proxy.upstreams import ECHO, model_files
from bench.scaler.models import echo_request, scaling
from bench.scaler.traffic import Client
from berth.kube import paths
from berth.kube.informer import Change, Informer
from berth.runtime.tasks import supervise
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec
from localcluster.model_server import serving
from localcluster.samples import model_deployment, model_service, packed
from localcluster.services import ServicePort

_NODE = NodeSpec(
    "gpu-1", 'gpus:\n  - {uuid: GPU-1-0, product: L40S, total: 48Gi}\nmodels: {"*": requested}\n'
)
# A Python model's first inference takes Triton a tenth of a second, with any client: it is done while the model loads.
_WARMED = b"""model_warmup [{
  name: "first", batch_size: 1, inputs {key: "IN", value: {data_type: TYPE_UINT8, dims: [1], zero_data: true}}
}]
"""
_AGAIN_SECONDS = 0.05
_LEADS_SECONDS = 60.0


@dataclass
class ColdStart:
    """Seconds from the first byte of the request on."""

    written: float = 0.0
    made: float = 0.0
    bound: float = 0.0
    loaded: float = 0.0
    answered: float = 0.0

    @property
    def steps(self) -> dict[str, float]:
        """Seconds of each phase."""
        reached = {"request": 0.0} | {one.name: getattr(self, one.name) for one in fields(self)}
        return {f"{a} to {b}": reached[b] - reached[a] for a, b in pairwise(reached)}

    @property
    def own(self) -> float:
        """What of it is neither the loader's nor the model's."""
        return self.answered - (self.loaded - self.bound)


class _Watch:
    """The phases of the model that is asked now."""

    def __init__(self) -> None:
        self.model, self.began, self.cold_start = "", 0.0, ColdStart()

    def begin(self, model: str) -> ColdStart:
        self.model, self.began, self.cold_start = model, time.monotonic(), ColdStart()
        return self.cold_start

    def deployment(self, change: Change) -> None:
        if change.object["metadata"]["name"] == self.model and change.object["spec"]["replicas"] > 0:
            self._note("written")

    def pod(self, change: Change) -> None:
        pod = change.object
        if (pod["metadata"].get("labels") or {}).get("app") != self.model:
            return
        self._note("made")
        if pod["spec"].get("nodeName"):
            self._note("bound")
        inits = pod.get("status", {}).get("initContainerStatuses") or []
        if inits and all("terminated" in one["state"] for one in inits):
            self._note("loaded")

    def _note(self, phase: str) -> None:
        if not getattr(self.cold_start, phase):
            setattr(self.cold_start, phase, time.monotonic() - self.began)


async def cold_starts(count: int) -> list[ColdStart]:
    """One of each of so many models."""
    spec = ClusterSpec(nodes=[_NODE], scalers=1, activators=1, agent_flags=("--code=any",))
    async with LocalCluster(spec) as cluster, serving() as url, supervise() as tasks:
        watch = _Watch()
        deployments = "/apis/apps/v1/namespaces/default/deployments"
        for path, take in ((deployments, watch.deployment), (paths.pods("default"), watch.pod)):
            tasks.eternal(path, Informer(cluster.client, path, on_change=take).run())
        files = model_files(ECHO)
        files["config.pbtxt"] += _WARMED
        source = url("echo.tar.gz", packed(**files))
        names = [f"model-{number}" for number in range(count)]
        for name in names:
            await cluster.apply(_documents(name, source))
        return [await _cold_start(cluster, watch, name) for name in names]


def _documents(name: str, source: str) -> list[dict[str, Any]]:
    annotations = scaling(target="10", clients="*", min_scale="0", scale_to_zero_pod_retention_period="1h")
    deployment = model_deployment(name, source=source, gpu_mem="1Gi", replicas=0, scaling=annotations)
    return [model_service(name), deployment]


async def _cold_start(cluster: LocalCluster, watch: _Watch, name: str) -> ColdStart:
    of = ServicePort("default", name, "http")
    async with asyncio.timeout(_LEADS_SECONDS):
        while not cluster.services.backends(of):
            await asyncio.sleep(_AGAIN_SECONDS)
    client = Client(lambda: cluster.services.backends(of), "127.0.0.9")
    cold_start = watch.begin(name)
    answer = await client.ask(echo_request(name))
    cold_start.answered = time.monotonic() - watch.began
    assert answer.status == 200, answer
    await client.close()
    # The watches may be behind an answer that needed none of them.
    await asyncio.sleep(1.0)
    return cold_start


def table(found: Sequence[ColdStart]) -> str:
    """For people."""
    lines = ["| seconds from the request on, and of each phase | p50 | p95 |", "|---|---|---|"]
    for name, values in (
        *(
            (field.name, [getattr(cold_start, field.name) for cold_start in found])
            for field in fields(ColdStart)
        ),
        *((step, [cold_start.steps[step] for cold_start in found]) for step in ColdStart().steps),
        ("answered, without bound to loaded", [cold_start.own for cold_start in found]),
    ):
        lines.append(f"| {name} | {_part(values, 0.5):.3f} | {_part(values, 0.95):.3f} |")
    return "\n".join(lines)


def _part(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]
