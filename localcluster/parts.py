"""Handles on Berth's own processes, which are containers of pods like any other."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from localcluster.kubelet.container import SERVICE_ACCOUNT, Container
from localcluster.kubelet.pod import PodRunner
from localcluster.processes import StartFailed

_START_SECONDS = 60.0


class Part:
    """One container of a pod that a controller keeps, found anew at each use: the pod may be another by then.

    `kill()` is a crash: the kubelet starts it again. `stop()` keeps it away until `start()`.
    """

    def __init__(self, name: str, container: str, find: Callable[[], PodRunner | None]) -> None:
        self.name = name
        self._container, self._find = container, find

    @property
    def pid(self) -> int | None:
        """None while it is not running."""
        found = self._find()
        container = None if found is None else found.containers.get(self._container)
        return None if container is None else container.pid

    @property
    def address(self) -> str:
        """The pod's. Raises ProcessLookupError while there is none."""
        return self._pod().pod_ip

    @property
    def service_account(self) -> Path:
        """The directory of the pod's own token. Raises LookupError for a container without one."""
        return Path(self._now().mounts[SERVICE_ACCOUNT])

    def kill(self) -> None:
        """kill -9, as a crash: only the process itself, so that its children must cope."""
        if self.pid is None:
            raise ProcessLookupError(f"{self.name} is not running")
        os.kill(self.pid, signal.SIGKILL)

    async def stop(self, *, grace_seconds: float = 5.0) -> None:
        """End it in order and keep it away."""
        await self._now().hold(grace_seconds=grace_seconds)

    async def start(self) -> None:
        """Let it start again; returns once its process runs. Raises StartFailed."""
        self._now().release()
        await self.running()

    async def running(self) -> None:
        """Wait until its process runs. Raises StartFailed with how its pod is."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while self.pid is None:
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            found = self._find()
            why = "it has no pod" if found is None else found.summary()
            raise StartFailed(f"{self.name} does not run after {_START_SECONDS:g} s: {why}") from error

    def _now(self) -> Container:
        return self._pod().containers[self._container]

    def _pod(self) -> PodRunner:
        found = self._find()
        if found is None:
            raise ProcessLookupError(f"{self.name} has no pod")
        return found
