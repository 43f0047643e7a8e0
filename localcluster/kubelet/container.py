"""One container: its processes one after another, its probes, its restarts, its end."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from berth.kube.times import utc_now
from berth.runtime.tasks import wait_until_set
from localcluster.in_pod import SERVICE_ACCOUNT_VARIABLE
from localcluster.kubelet.backoff import CrashBackoff
from localcluster.kubelet.expansion import expand
from localcluster.kubelet.images import Image
from localcluster.kubelet.memory import limit_of, used_bytes
from localcluster.kubelet.probes import Probe
from localcluster.kubelet.refusal import entrypoint_of, search_path
from localcluster.kubelet.rewriting import own_loopback, rewrite, service_names
from localcluster.kubelet.status import ContainerRecord, Running, Terminated, Waiting
from localcluster.processes import end, signal_group, spawn, tail

JsonObject = dict[str, Any]

# What a kubelet puts into a termination message at most.
_MESSAGE_BYTES, _MESSAGE_LINES = 2048, 80
# Between SIGTERM and SIGKILL at least, also when preStop has used up the grace.
_SHORTEST_GRACE_SECONDS = 2.0
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# A cgroup counts each page; who grows faster than this is ended a moment late.
_MEMORY_SECONDS = 0.25
# What tells a program where a mount is whose path it has built in.
_BUILT_IN = {"TMPDIR": "/tmp", SERVICE_ACCOUNT_VARIABLE: SERVICE_ACCOUNT}  # noqa: S108 - a mountPath


def no_services(namespace: str, name: str) -> str:
    """Of a cluster without any."""
    raise LookupError(f"no Service {namespace}/{name}")


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that is needed to start the container's process."""

    spec: JsonObject
    image: Image
    env: Mapping[str, str]  # the container's own variables, expanded
    base_env: Mapping[str, str]  # what the machine and the cluster add
    mounts: Mapping[str, str]
    directory: Path
    pod_ip: str
    grace_seconds: float  # the pod's
    service: Callable[[str, str], str] = no_services  # a Service's address, by namespace and name

    def command(self) -> list[str]:
        """Entrypoint or command, then arguments: expanded, then with directories for mounts."""
        words = [*entrypoint_of(self.spec, self.image), *(self.spec.get("args") or [])]
        return [self.here(expand(word, self.env)) for word in words]

    def environment(self) -> dict[str, str]:
        own = {name: self.here(value) for name, value in self.env.items()}
        return {**self.base_env, **self._of_machine(), **own}

    def here(self, text: str) -> str:
        """With what the container finds at its mountPaths, on its loopback and under Services' names, as it is on
        this machine."""
        own = own_loopback(rewrite(text, self._places()), self.pod_ip)
        return service_names(own, self.service)

    def _of_machine(self) -> dict[str, str]:
        """What stands in for an image and for mounts at places that programs have built in."""
        known = {"POD_IP": self.pod_ip}
        image = {name: expand(value, known) for name, value in self.image.environment.items()}
        places = {name: self.mounts[path] for name, path in _BUILT_IN.items() if path in self.mounts}
        return {"PATH": search_path(self.image), **image, **places}

    @property
    def termination_file(self) -> Path:
        return self.directory / "termination-log"

    def working_directory(self) -> Path:
        path = self.spec.get("workingDir")
        return Path(self.here(path)) if path else self.directory

    def grace_of(self, probe: str) -> float:
        """How long a container may take to end that has failed this probe."""
        own = (self.spec.get(probe) or {}).get("terminationGracePeriodSeconds")
        return self.grace_seconds if own is None else float(own)

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
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._process: asyncio.subprocess.Process | None = None
        self._unhealthy = self._out_of_memory = False
        self._memory_limit = limit_of(launch.spec)

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def mounts(self) -> Mapping[str, str]:
        """mountPath to directory."""
        return self._launch.mounts

    @property
    def log(self) -> Path:
        """The log of the current run."""
        return self._launch.directory / f"{self.record.restarts}.log"

    async def run(self) -> None:
        """Start, watch and restart by the pod's restartPolicy; returns when it has ended for good."""
        backoff = CrashBackoff()
        self._launch.directory.mkdir(parents=True, exist_ok=True)
        while True:
            ended = await self._run_once()
            if self._stopping.is_set() or not self._restarts(ended):
                self._set(ended, ended_for_good=True)
                return
            self.record.last = ended
            if not await self._paused(backoff.after((ended.finished - ended.started).total_seconds())):
                self._set(ended, ended_for_good=True)
                return
            self.record.restarts += 1

    async def stop(self, *, grace_seconds: float) -> None:
        """preStop and SIGTERM, then SIGKILL once the grace is over. `run` returns afterwards."""
        self._stopping.set()
        await self._end(grace_seconds)

    async def hold(self, *, grace_seconds: float) -> None:
        """End it and keep it down until `release`: for tests, no kubelet does that."""
        self._allowed.clear()
        await self._end(grace_seconds)

    def release(self) -> None:
        """Let a container in backoff start again, without a pause."""
        self._allowed.set()

    async def _end(self, grace_seconds: float) -> None:
        """SIGTERM goes to the first process only, as in a container; SIGKILL to whatever is left."""
        process = self._process
        if process is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_seconds
        if process.returncode is None and grace_seconds > 0:
            await self._pre_stop(grace_seconds)
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(_SHORTEST_GRACE_SECONDS, deadline - loop.time())):
                    await process.wait()
        signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    async def _paused(self, seconds: float) -> bool:
        """Wait until it may start again; False if it is to end instead."""
        if seconds > 0:
            name = self.record.name
            self._set(
                Waiting("CrashLoopBackOff", f"back-off {seconds:g}s restarting failed container={name}")
            )
        if self._allowed.is_set() and await wait_until_set(self._stopping, timeout_seconds=seconds):
            return False
        waits = [asyncio.create_task(event.wait()) for event in (self._allowed, self._stopping)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._stopping.is_set()

    async def _run_once(self) -> Terminated:
        started = utc_now()
        launch = self._launch
        launch.termination_file.write_text("")
        try:
            _make_missing(launch.mounts.values())
            self._process = await spawn(
                launch.command(), log=self.log, env=launch.environment(), cwd=launch.working_directory()
            )
        except OSError as error:
            return Terminated(127, started, utc_now(), f"cannot start: {error}")
        if self._stopping.is_set() or not self._allowed.is_set():
            signal_group(self._process.pid, signal.SIGKILL)  # who said so meanwhile has found nothing to end
        self.record.ready = self.record.started = self._out_of_memory = False
        self._set(Running(started))
        await self._watch(self._process)
        signal_group(self._process.pid, signal.SIGKILL)  # whatever it left behind in its session
        self.record.ready = self.record.started = False
        code = self._process.returncode or 0
        message = self._message(code)
        return Terminated(
            128 - code if code < 0 else code, started, utc_now(), message, out_of_memory=self._out_of_memory
        )

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Return when the process has ended; probes run meanwhile."""
        self._probes: list[asyncio.Task[None]] = []  # before any wait: the process may have ended already
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(self._probe(group))
            bounding = group.create_task(self._keep_within_memory(process.pid))
            await process.wait()
            probing.cancel()
            bounding.cancel()
            for task in self._probes:
                task.cancel()

    async def _keep_within_memory(self, pid: int) -> None:
        """As a cgroup whose memory is out: all that is in it is killed at once (memory.oom.group)."""
        limit = self._memory_limit
        while limit is not None:
            await asyncio.sleep(_MEMORY_SECONDS)
            if used_bytes(pid, enough=limit) > limit:
                self._out_of_memory = True
                signal_group(pid, signal.SIGKILL)
                return

    async def _probe(self, group: asyncio.TaskGroup) -> None:
        if startup := self._make_probe("startupProbe", ready=False):
            await self._until_started(startup)
        self.record.started = True
        readiness = self._make_probe("readinessProbe", ready=False)
        self.record.ready = readiness is None
        self._changed()
        if readiness:
            self._probes.append(group.create_task(readiness.run(lambda *_: self._set_ready(readiness))))
        if liveness := self._make_probe("livenessProbe", ready=True):
            run = liveness.run(lambda *outcome: self._on_health("livenessProbe", *outcome))
            self._probes.append(group.create_task(run))

    async def _until_started(self, probe: Probe) -> None:
        passed = asyncio.Event()

        def on_outcome(outcome: bool, reached: bool) -> None:
            if reached and outcome:
                passed.set()
            else:
                self._on_health("startupProbe", outcome, reached)

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

    def _on_health(self, probe: str, outcome: bool, reached: bool) -> None:
        """A container that fails its liveness is ended; its restartPolicy decides what follows."""
        if outcome or not reached or self._process is None or self._unhealthy:
            return
        self._unhealthy = True
        self._ending = asyncio.create_task(self._end_unhealthy(self._launch.grace_of(probe)))

    async def _end_unhealthy(self, grace_seconds: float) -> None:
        await self._end(grace_seconds)
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
        words = [launch.here(word) for word in command]
        process = await spawn(
            words, log=launch.directory / "exec.log", env=launch.environment(), cwd=launch.working_directory()
        )
        try:
            return await process.wait()
        finally:
            # Also when its time is up or the container has ended: nothing else waits for it.
            await end(process, grace_seconds=0)

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


def _make_missing(places: Iterable[str]) -> None:
    """What a subPath names is a directory unless an earlier container has made it a file."""
    for place in map(Path, places):
        if not place.exists():
            place.mkdir(parents=True)


def base_environment(marks: Mapping[str, str]) -> dict[str, str]:
    """What every container gets from this machine, and nothing of the caller's own settings."""
    kept = {name: os.environ[name] for name in ("LANG", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONUNBUFFERED": "1", **marks}
