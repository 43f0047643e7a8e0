"""The node's report as its facts are now. No I/O."""

from dataclasses import dataclass

from agent.gpu_facts import GpuFacts, OtherUse, gpu_reports
from agent.serving.slots import Slots
from agent.serving.triton_sync import TritonSync
from berth.contract.report import GpuReport, NodeReport, TritonReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What does not change while the agent runs."""

    server_name: str
    capabilities: tuple[str, ...]
    backends: tuple[str, ...]
    headroom_bytes: int


class NodeReporting:
    def __init__(self, facts: NodeFacts, slots: Slots, gpus: GpuFacts, triton: TritonSync) -> None:
        self._facts, self._slots, self._gpus, self._triton = facts, slots, gpus, triton
        self._other_use = OtherUse()

    def report(self) -> NodeReport:
        facts, version = self._facts, self._triton.version
        return NodeReport(
            server=facts.server_name,
            capabilities=facts.capabilities,
            triton=TritonReport(version is not None, version or "", facts.backends),
            gpus=self._gpu_reports(),
            models=tuple(sorted((model.report() for model in self._slots.models), key=lambda m: m.pod_uid)),
            code=self._slots.gate.report(),
        )

    def gpu_reports(self) -> tuple[GpuReport, ...]:
        """Raises GpusUnknown while no GPU has ever been seen."""
        self._gpus.listed()
        return self._gpu_reports()

    def _gpu_reports(self) -> tuple[GpuReport, ...]:
        return gpu_reports(
            self._gpus,
            self._slots.models,
            self._other_use,
            busy=self._slots.busy_gpus(),
            headroom_bytes=self._facts.headroom_bytes,
        )
