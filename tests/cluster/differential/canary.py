"""A pod that fits only once kube-scheduler has seen the last object of every kind.

It needs the canary's node, the label of its namespace, a pod in that namespace, a claim that is bound to
a volume, and a claim of a storage class. Their names are new for each world: kube-scheduler may still
see those of the world before.
"""

from dataclasses import dataclass

from tests.cluster.differential.objects import GPU_MEMORY, SCHEDULER_NAME, Json, Objects
from tests.fakes.objects import GIB, KEYS, gpu, report

_KEY = "example.com/canary"
_BOUND = {"pv.kubernetes.io/bind-completed": "yes"}


@dataclass(frozen=True, slots=True)
class Canary:
    """One world's; `name` is that of its node, namespace, volume and storage class."""

    name: str

    def objects(self) -> Objects:
        """To be created after everything else. They are part of the world like any other."""
        return Objects(
            nodes=[self._node()],
            namespaces=[{"metadata": {"name": self.name, "labels": {**self._labels, "world": "any"}}}],
            storage_classes=[
                {
                    "metadata": {"name": self.name},
                    "provisioner": "example.com/canary",
                    "volumeBindingMode": "WaitForFirstConsumer",
                }
            ],
            volumes=[self._volume()],
            claims=[
                self._claim("bound", volume=self.name, storage_class=""),
                self._claim("waiting", volume="", storage_class=self.name),
            ],
            pods=[
                {
                    "metadata": {"name": "canary", "namespace": self.name, "labels": self._labels},
                    "spec": {"nodeName": self.name, "containers": [{"name": "main", "image": "any"}]},
                }
            ],
        )

    def pod(self, number: int) -> Json:
        """A new one for each try."""
        term = {
            "topologyKey": _KEY,
            "labelSelector": {"matchLabels": self._labels},
            "namespaceSelector": {"matchLabels": self._labels},
        }
        required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        return {
            "metadata": {"name": f"canary-{number}", "namespace": self.name},
            "spec": {
                "schedulerName": SCHEDULER_NAME,
                "nodeSelector": self._labels,
                "tolerations": [{"key": _KEY, "operator": "Exists"}],
                "affinity": {"podAffinity": required},
                "containers": [
                    {"name": "main", "image": "any", "resources": {"limits": {GPU_MEMORY: "1Mi"}}},
                ],
                "volumes": [
                    {"name": name, "persistentVolumeClaim": {"claimName": name}}
                    for name in ("bound", "waiting")
                ],
            },
        }

    @property
    def _labels(self) -> dict[str, str]:
        return {_KEY: self.name}

    def _node(self) -> Json:
        gpus = report(gpu(f"GPU-{self.name}", total=4096 * GIB)).encode()
        return {
            "metadata": {"name": self.name, "labels": self._labels, "annotations": {KEYS.report: gpus}},
            "spec": {"taints": [{"key": _KEY, "effect": "NoSchedule"}]},
            "status": {"allocatable": {"cpu": "1", "memory": "1Gi", "pods": "10"}},
        }

    def _volume(self) -> Json:
        return {
            "metadata": {"name": self.name},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": "/canary"},
                "claimRef": {"namespace": self.name, "name": "bound"},
            },
            "status": {"phase": "Bound"},
        }

    def _claim(self, name: str, *, volume: str, storage_class: str) -> Json:
        return {
            "metadata": {"name": name, "namespace": self.name, "annotations": _BOUND if volume else {}},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
                "storageClassName": storage_class,
                **({"volumeName": volume} if volume else {}),
            },
            "status": {"phase": "Bound" if volume else "Pending"},
        }
