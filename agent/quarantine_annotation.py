"""The operator's command to end a quarantine: an annotation on the Node."""

from agent.serving.crash_recorder import CrashRecorder
from berth.contract.ids import NodeName
from berth.kube import paths
from berth.kube.client import JsonObject, KubeClient


class QuarantineAnnotation:
    def __init__(self, client: KubeClient, *, node: NodeName, key: str, crashes: CrashRecorder) -> None:
        self._client, self._node, self._key, self._crashes = client, node, key, crashes

    async def take(self, node: JsonObject) -> None:
        """Do once what the annotation asks, and take it away: it is a command, not a state. Raises KubeError or
        OSError."""
        metadata = node["metadata"]
        request = (metadata.get("annotations") or {}).get(self._key)
        if request is None or not await self._crashes.lift(request):
            return
        # With the version: a value that was written meanwhile is another command.
        done = {"resourceVersion": metadata["resourceVersion"], "annotations": {self._key: None}}
        await self._client.patch(paths.node(self._node), {"metadata": done})
