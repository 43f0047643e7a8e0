"""Pods and models of several namespaces, on nodes with a code rule."""

from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import CodeReport, CodeRule, ModelReport
from binder.pod.demand import parse_demand
from binder.rules.registry import FITS, RULES
from tests.fakes.binder import PLENTY, Bench
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

APART, NONE, ANY = CodeRule.NAMESPACE, CodeRule.NONE, CodeRule.ANY
REQUIRES = {KEYS.requirements: "python"}
OTHERS, AMONG, NEVER = "CodeOfAnotherNamespace", "ModelsOfOtherNamespaces", "CodeNotAllowed"


class Tenants(Bench):
    """Pods of several namespaces, named by namespace and number: a1, b1, ..."""

    def nodes(self, name: str, rule: CodeRule = APART, code: str | None = None, *models: ModelReport) -> None:
        says = report(
            gpu(f"{name}-0", total=16 * GIB),
            models=models,
            code=CodeReport(rule, code),
            capabilities=("python", "onnxruntime"),
        )
        self.tell("nodes", node(name, says=says, allocatable=PLENTY))
        self.scheduler.cluster.decider.table.beat(NodeName(name), 1e9)

    def pod(
        self, uid: str, *, code: bool = False, on: str | None = None, template: str = "", **more: Any
    ) -> dict[str, Any]:
        one = pod(
            uid,
            annotations={KEYS.model_id: f"model-{template or uid}", **(REQUIRES if code else {})},
            **({"on": on, "choice": GpuChoice(GpuUuid(f"{on}-0"), 0, GIB)} if on else {}),
            **more,
        )
        one["metadata"]["namespace"] = uid[0]
        one["metadata"]["ownerReferences"] = [{"uid": f"rs-{template or uid}", "controller": True}]
        self.api.pods[uid] = one
        self.tell("pods", one)
        return one

    def verdict(self, uid: str, *, code: bool = False) -> dict[str, str]:
        """Why each node refuses such a pod; "" where it fits."""
        one = pod(uid, annotations=REQUIRES if code else {})
        one["metadata"]["namespace"] = uid[0]
        decider = self.scheduler.cluster.decider
        codes = decider.codes(parse_demand(one, KEYS))
        return {
            name: "" if codes[row] == FITS else RULES.rule(int(codes[row])).name
            for name, row in decider.table.row_of.items()
        }


def row(uid: str, on: str, **changes: Any) -> ModelReport:
    return replace(listed(uid, on=f"{on}-0"), namespace=uid[0], **changes)
