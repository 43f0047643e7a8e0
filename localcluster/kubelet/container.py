"""One container: its processes one after another, its probes, its restarts, its end."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from berth.kube.times import utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.tasks import wait_until_set
from localcluster.kubelet.expansion import expand
from localcluster.kubelet.probes import Probe
from localcluster.kubelet.refusal import program_of
from localcluster.kubelet.rewriting import rewrite
from localcluster.kubelet.status import ContainerRecord, Running, Terminated, Waiting
from localcluster.processes import end, signal_group, spawn, tail

JsonObject = dict[str, Any]

# What a kubelet puts into a termination message at most.
_MESSAGE_BYTES, _MESSAGE_LINES = 2048, 80
# A kubelet waits 10 s doubling to 5 min; here people and tests are waiting.
_CRASH_INITIAL_SECONDS, _CRASH_CAP_SECONDS = 1.0, 30.0
_CALM_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that is needed to start the container's process."""

    spec: JsonObject
    env: Mapping[str, str]  # the container's own variables, expanded
    base_env: Mapping[str, str]  # what the machine and the cluster add
    mounts: Mapping[str, str]
    directory: Path
    pod_ip: str

    def command(self) -> list[str]:
        """Entrypoint or command, then arguments: expanded, then with directories for mounts."""
        spec = self.spec
        words = [*program_of(spec), *(spec.get("command") or []), *(spec.get("args") or [])]
        words = [rewrite(expand(word, self.env), self._places()) for word in words]
        return [sys.executable, "-m", "berth.cli", *words[1:]] if words[0] == "berth" else words

    def environment(self) -> dict[str, str]:
        return {**self.base_env, **{name: rewrite(value, self._places()) for name, value in self.env.items()}}

    @property
    def termination_file(self) -> Path:
        return self.directory / "termination-log"

    def working_directory(self) -> Path:
        path = self.spec.get("workingDir")
        return Path(rewrite(path, self._places())) if path else self.directory

    def _places(self) -> dict[str, str]:
        path = self.spec.get("terminationMessagePath") or "/dev/termination-log"
        return {**self.mounts, path: str(self.termination_file)}


class Container:
    """Runs one container until it ends for good. `changed` is called after every change of `record`."""

    def __init__(
        self, launch: Launch, record: ContainerRecord, *, restart_policy: str, changed: Callable[[], None]
    ) -> None:
        self.record = record
        self._launch, self._policy, self._changed = launch, restart_policy, changed
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._unhealthy = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def log(self) -> Path:
        """The log of the current run."""
        return self._launch.directory / f"{self.record.restarts}.log"

    async def run(self) -> None:
        """Start, watch and restart by the pod's restartPolicy; returns when it has ended for good."""
        backoff = Backoff(initial_seconds=_CRASH_INITIAL_SECONDS, cap_seconds=_CRASH_CAP_SECONDS, jitter=0)
        self._launch.directory.mkdir(parents=True, exist_ok=True)
        while True:
            ended = await self._run_once()
            if (ended.finished - ended.started).total_seconds() > _CALM_SECONDS:
                backoff.reset()
            if self._stopping.is_set() or not self._restarts(ended):
                self._set(ended, ended_for_good=True)
                return
            self.record.last = ended
            self._set(Waiting("CrashLoopBackOff", f"back-off {backoff.failures + 1}"))
            if await wait_until_set(self._stopping, timeout_seconds=backoff.next()):
                self._set(ended, ended_for_good=True)
                return
            self.record.restarts += 1

    async def stop(self, *, grace_seconds: float) -> None:
        """preStop and SIGTERM, then SIGKILL once the grace is over. `run` returns afterwards."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        deadline = asyncio.get_running_loop().time() + grace_seconds
        if process.returncode is None and grace_seconds > 0:
            await self._pre_stop(grace_seconds)
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        await end(process, grace_seconds=left)

    async def _run_once(self) -> Terminated:
        started = utc_now()
        launch = self._launch
        launch.termination_file.write_text("")
        try:
            self._process = await spawn(
                launch.command(), log=self.log, env=launch.environment(), cwd=launch.working_directory()
            )
        except OSError as error:
            return Terminated(127, started, utc_now(), f"cannot start: {error}")
        self.record.ready = self.record.started = False
        self._set(Running(started))
        await self._watch(self._process)
        signal_group(self._process.pid, signal.SIGKILL)  # whatever it left behind in its session
        self.record.ready = self.record.started = False
        code = self._process.returncode or 0
        return Terminated(128 - code if code < 0 else code, started, utc_now(), self._message(code))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Return when the process has ended; probes run meanwhile."""
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(self._probe(group))
            await process.wait()
            probing.cancel()
            for task in self._probes:
                task.cancel()

    async def _probe(self, group: asyncio.TaskGroup) -> None:
        self._probes: list[asyncio.Task[None]] = []
        if startup := self._make_probe("startupProbe", ready=False):
            await self._until_started(startup)
        self.record.started = True
        readiness = self._make_probe("readinessProbe", ready=False)
        self.record.ready = readiness is None
        self._changed()
        if readiness:
            self._probes.append(group.create_task(readiness.run(lambda *_: self._set_ready(readiness))))
        if liveness := self._make_probe("livenessProbe", ready=True):
            self._probes.append(group.create_task(liveness.run(self._on_liveness)))

    async def _until_started(self, probe: Probe) -> None:
        passed = asyncio.Event()

        def on_outcome(outcome: bool, reached: bool) -> None:
            if reached and outcome:
                passed.set()
            elif reached:
                self._on_liveness(False, True)

        running = asyncio.create_task(probe.run(on_outcome))
        try:
            await passed.wait()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    def _make_probe(self, name: str, *, ready: bool) -> Probe | None:
        spec = self._launch.spec.get(name)
        if spec is None:
            return None
        return Probe(spec, self._launch.spec, pod_ip=self._launch.pod_ip, run=self._exec, ready=ready)

    def _set_ready(self, probe: Probe) -> None:
        if self.record.ready != probe.verdict.passed:
            self.record.ready = probe.verdict.passed
            self._changed()

    def _on_liveness(self, outcome: bool, reached: bool) -> None:
        """A container that fails its liveness is ended; its restartPolicy decides what follows."""
        if outcome or not reached or self._process is None or self._unhealthy:
            return
        self._unhealthy = True
        grace = float(self._launch.spec.get("terminationGracePeriodSeconds") or 30)
        self._ending = asyncio.create_task(self._end_unhealthy(self._process, grace))

    async def _end_unhealthy(self, process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        await end(process, grace_seconds=grace_seconds)
        self._unhealthy = False

    async def _pre_stop(self, grace_seconds: float) -> None:
        hook = (self._launch.spec.get("lifecycle") or {}).get("preStop") or {}
        with suppress(TimeoutError, OSError, aiohttp.ClientError):
            async with asyncio.timeout(grace_seconds):
                if command := hook.get("exec"):
                    await self._exec(command["command"])
                elif pause := hook.get("sleep"):
                    await asyncio.sleep(pause["seconds"])
                elif http := hook.get("httpGet"):
                    probe = {"httpGet": http, "timeoutSeconds": grace_seconds}
                    await Probe(
                        probe, self._launch.spec, pod_ip=self._launch.pod_ip, run=self._exec, ready=False
                    ).once()

    async def _exec(self, command: list[str]) -> int:
        """Run a command beside the container, with its environment and directories."""
        launch = self._launch
        words = [rewrite(word, launch.mounts) for word in command]
        process = await spawn(
            words, log=launch.directory / "exec.log", env=launch.environment(), cwd=launch.working_directory()
        )
        try:
            return await process.wait()
        finally:
            signal_group(process.pid, signal.SIGKILL)

    def _restarts(self, ended: Terminated) -> bool:
        if self.record.is_sidecar:
            return True
        if self.record.is_init:
            return ended.exit_code != 0 and self._policy != "Never"
        return self._policy == "Always" or (self._policy == "OnFailure" and ended.exit_code != 0)

    def _message(self, code: int) -> str:
        with suppress(OSError):
            said = self._launch.termination_file.read_text(errors="replace")[:4096]
            if said:
                return said
        if code == 0 or self._launch.spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return ""
        lines = tail(self.log, _MESSAGE_BYTES).splitlines()
        return "\n".join(lines[-_MESSAGE_LINES:])

    def _set(self, state: Waiting | Running | Terminated, *, ended_for_good: bool = False) -> None:
        self.record.state, self.record.ended = state, ended_for_good
        self._changed()


def base_environment(marks: Mapping[str, str]) -> dict[str, str]:
    """What every container gets from this machine: the search path and nothing of the caller's own settings."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONUNBUFFERED": "1", **marks}
