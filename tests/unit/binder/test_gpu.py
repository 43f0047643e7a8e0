"""GPU memory: what fits on which GPU, and each GPU's own reason."""

from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from binder.engine.decision import Placement
from binder.engine.explain import sentence
from binder.pod.demand import product_key
from tests.fakes.cluster import cluster_of, decide, sized, verdict
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]
GPUS: dict[str, tuple[Json, Any, str | None]] = {
    "fits": ({"mem": "16Gi"}, gpu(), None),
    "asks for nothing": ({"mem": None}, gpu(total=GIB, other_use_bytes=GIB), None),
    "over its memory": (
        {"mem": None},
        gpu(total=GIB, other_use_bytes=2 * GIB),
        "GPUMemoryInsufficient: 1 GiB short",
    ),
    "short": ({"mem": "17Gi"}, gpu(), "GPUMemoryInsufficient: 1 GiB short"),
    "sick": ({}, gpu(healthy=False, reason="XID 79"), "GPUUnhealthy: XID 79"),
    "unknown": ({}, gpu(total=None, reason="NVML"), "GPUFactsUnknown: NVML"),
    "another product": (
        {"annotations": {KEYS.gpu_product: "H100,A100"}},
        gpu(healthy=False),
        "GPUProductMismatch: T4 is not one of A100, H100",
    ),
    "the product": ({"annotations": {KEYS.gpu_product: "t4"}}, gpu(), None),
}


@pytest.mark.parametrize("case", GPUS)
def test_each_gpu_has_its_own_reason(case: str) -> None:
    asks, has, expected = GPUS[case]
    reason = verdict(cluster_of(node(says=report(has))), pod(**asks)).gpus[0].reason
    assert (None if reason is None else sentence(reason)) == expected


COUNT_3 = {KEYS.gpu_count: "3"}
# The GPUs, what is asked, how many bytes are missing.
SHORT: dict[str, tuple[Json, Json, int | None]] = {
    "all that is left": (
        node(says=report(gpu(other_use_bytes=GIB, headroom_bytes=GIB))),
        {"mem": str(14 * GIB)},
        None,
    ),
    "a byte more": (
        node(says=report(gpu(other_use_bytes=GIB, headroom_bytes=GIB))),
        {"mem": str(14 * GIB + 1)},
        1,
    ),
    "a GPU, not the node": (sized("n1", 12, 12), {"mem": "20Gi"}, 8 * GIB),
    "each of several GPUs": (sized("n1", 1, 2, 3, 4), {"mem": "9Gi", "annotations": COUNT_3}, GIB),
}


@pytest.mark.parametrize("case", SHORT)
def test_how_much_memory_is_missing(case: str) -> None:
    has, asks, short = SHORT[case]
    reason = verdict(cluster_of(has), pod(**asks)).reason
    found = None if reason is None else (reason.rule, reason.short_bytes)
    assert found == (None if short is None else ("GPUMemoryInsufficient", short))


def test_one_sick_gpu_does_not_hide_the_other() -> None:
    cluster = cluster_of(node(says=report(gpu("GPU-a", healthy=False), gpu("GPU-b", index=1))))
    assert [one.gpu.uuid for one in verdict(cluster, pod()).gpus if one.reason is None] == ["GPU-b"]


def test_several_gpus_are_distinct_and_each_has_the_bytes() -> None:
    found = decide(cluster_of(sized("n1", 1, 2, 3, 4)), pod(mem="6Gi", annotations={KEYS.gpu_count: "2"}))
    assert isinstance(found, Placement)
    assert found.gpu is not None
    assert [(one.uuid, one.index) for one in found.gpu.gpus] == [("n1-2", 2), ("n1-3", 3)]
    assert GpuChoice.decode(found.gpu.encode()) == found.gpu


def test_a_product_is_spelled_as_nvml_and_as_node_labels_spell_it() -> None:
    assert product_key(" NVIDIA A100-SXM4-80GB ") == product_key("nvidia-a100-sxm4-80gb")
    assert product_key("A100") != product_key("A10")
