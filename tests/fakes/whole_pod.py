"""A pod that uses every field that the binder reads, and many that it does not."""

from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from tests.fakes.objects import GIB, pod

Json = dict[str, Any]


TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "x"}}}
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)


def everything() -> Json:
    made = pod(
        on="n1",
        choice=CHOICE,
        created="2026-01-02T03:04:05Z",
        priority=7,
        preemptionPolicy="Never",
        nodeSelector={"zone": "a"},
        tolerations=[{"operator": "Exists"}],
        affinity={
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
        },
        topologySpreadConstraints=[{"topologyKey": "zone", "maxSkew": 2}],
        schedulingGates=[{"name": "g"}],
        overhead={"cpu": "100m"},
        resources={"requests": {"memory": "1Gi"}},
        resourceClaims=[{"name": "r"}],
        volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
        initContainers=[
            {
                "name": "s",
                "restartPolicy": "Always",
                "resources": {"requests": {"cpu": "1"}},
                "ports": [{"hostPort": 81}],
                "env": [{"name": "E"}],
            }
        ],
        serviceAccountName="x",
    )
    made["spec"]["containers"][0] |= {"ports": [{"hostPort": 80, "protocol": "UDP"}], "args": ["a"]}
    made["metadata"] |= {
        "labels": {"app": "x"},
        "ownerReferences": [{"uid": "helper"}, {"uid": "rs", "controller": True}],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "resourceVersion": "5",
        "managedFields": [{"fieldsV1": {}}],
    }
    made["status"] = {
        "phase": "Failed",
        "nominatedNodeName": "n2",
        "conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "no room"}],
        "containerStatuses": [{"name": "proxy", "resources": {"requests": {"cpu": "2"}}, "imageID": "i"}],
        "initContainerStatuses": [{"name": "s", "allocatedResources": {"cpu": "3"}, "resources": {}}],
        "resources": {"requests": {"memory": "2Gi"}},
        "podIP": "10.0.0.1",
    }
    return made
