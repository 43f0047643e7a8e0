"""A container's processes without a cluster: signals, restarts, what is said of its end."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from localcluster.kubelet import container as module
from localcluster.kubelet.container import Container, Launch
from localcluster.kubelet.images import Image
from localcluster.kubelet.memory import used_bytes
from localcluster.kubelet.status import ContainerRecord, Running, Terminated, Waiting
from localcluster.processes import spawn

MIB = 1024**2
FOREVER = "while true; do sleep 0.02; done"


class Run:
    """One container that is running, and every state that it has been in."""

    def __init__(
        self,
        directory: Path,
        script: str,
        *,
        policy: str = "Always",
        mounts: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> None:
        self.record = ContainerRecord("c", "any")
        self.states: list[Running | Waiting | Terminated] = []
        launch = Launch(
            spec={"name": "c", "image": "any", "command": ["sh", "-c", script], **spec},
            image=Image(),
            env={},
            base_env={},
            mounts=mounts or {},
            directory=directory / "c",
            pod_ip="127.20.1.5",
            grace_seconds=30,
        )
        self.container = Container(launch, self.record, restart_policy=policy, changed=self._note)
        self.task = asyncio.create_task(self.container.run())

    def _note(self) -> None:
        if not self.states or self.states[-1] is not self.record.state:
            self.states.append(self.record.state)

    @property
    def said(self) -> str:
        try:
            return self.container.log.read_text()
        except FileNotFoundError:
            return ""

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not check():
                await asyncio.sleep(0.01)

    async def ends(self, ending: Awaitable[None] | None = None) -> Terminated:
        if ending is not None:
            await ending
        async with asyncio.timeout(30):
            await self.task
        assert isinstance(self.record.state, Terminated)
        return self.record.state


async def test_sigterm_goes_to_the_first_process_alone_and_what_it_leaves_goes_with_it(
    tmp_path: Path,
) -> None:
    """As in a container: whoever starts processes has to end them."""
    child = f"trap 'echo child got TERM' TERM; echo child is $$$$; {FOREVER}"
    first = f"trap 'echo first got TERM; sleep 0.3; exit 7' TERM; (sh -c {shlex.quote(child)}) & {FOREVER}"
    run = Run(tmp_path, first)
    await run.until(lambda: "child is" in run.said)
    pid = int(run.said.split("child is ")[1].split()[0])
    ended = await run.ends(run.container.stop(grace_seconds=20))
    assert ended.exit_code == 7
    assert "first got TERM" in run.said
    assert "child got TERM" not in run.said
    await run.until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    """Not gone, and no zombie that nobody has looked at yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_hook_that_uses_up_the_grace_leaves_two_seconds(tmp_path: Path) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 30"]}}}
    run = Run(
        tmp_path, f"trap 'sleep 0.5; echo ended in order; exit 0' TERM; echo up; {FOREVER}", lifecycle=hook
    )
    await run.until(lambda: "up" in run.said)
    ended = await run.ends(run.container.stop(grace_seconds=0.2))
    assert (ended.exit_code, "ended in order" in run.said) == (0, True)


async def test_what_is_told_to_stop_or_to_stay_down_before_it_runs_does_so(tmp_path: Path) -> None:
    stopped = Run(tmp_path / "stopped", FOREVER)
    assert (await stopped.ends(stopped.container.stop(grace_seconds=20))).exit_code == 137
    held = Run(tmp_path / "held", FOREVER)
    await held.container.hold(grace_seconds=20)
    await held.until(lambda: isinstance(held.record.last, Terminated))
    assert (held.container.pid, held.task.done()) == (None, False)
    await held.ends(held.container.stop(grace_seconds=0))


async def test_the_first_crash_is_started_again_at_once_and_the_second_after_a_pause(tmp_path: Path) -> None:
    run = Run(tmp_path, "exit 3")
    await run.until(lambda: isinstance(run.record.state, Waiting) and run.record.restarts == 1)
    assert run.record.state == Waiting("CrashLoopBackOff", "back-off 1s restarting failed container=c")
    assert run.record.last is not None
    assert [type(state) for state in run.states] == [Running, Running, Waiting]
    await run.ends(run.container.stop(grace_seconds=0))


async def test_a_container_that_is_held_stays_down_until_it_is_released(tmp_path: Path) -> None:
    run = Run(tmp_path, f"echo up; {FOREVER}")
    await run.until(lambda: run.container.pid is not None)
    await run.container.hold(grace_seconds=0)
    await asyncio.sleep(0.1)
    assert (run.container.pid, run.task.done()) == (None, False)
    run.container.release()
    await run.until(lambda: run.container.pid is not None)
    assert run.record.restarts == 1
    await run.ends(run.container.stop(grace_seconds=0))


async def test_a_container_that_is_held_ends_with_its_pod(tmp_path: Path) -> None:
    run = Run(tmp_path, FOREVER)
    await run.until(lambda: run.container.pid is not None)
    await run.container.hold(grace_seconds=0)
    assert (await run.ends(run.container.stop(grace_seconds=5))).exit_code == 137


async def test_a_failed_liveness_ends_it_in_its_own_grace_and_runs_the_hook(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 0, "failureThreshold": 1}
    run = Run(
        tmp_path,
        f"trap '' TERM; {FOREVER}",
        policy="Never",
        livenessProbe={**probe, "terminationGracePeriodSeconds": 1},
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", f"echo hook > {tmp_path}/hook"]}}},
    )
    assert (await run.ends()).exit_code == 128 + signal.SIGKILL
    assert (tmp_path / "hook").read_text() == "hook\n"


async def test_a_probe_that_its_containers_end_cuts_short_has_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[asyncio.subprocess.Process] = []

    async def noting(*what: Any, **more: Any) -> asyncio.subprocess.Process:
        children.append(await spawn(*what, **more))
        return children[-1]

    monkeypatch.setattr(module, "spawn", noting)
    probe = {"exec": {"command": ["sleep", "1000"]}, "timeoutSeconds": 1000}
    run = Run(tmp_path, FOREVER, readinessProbe=probe)
    await run.until(lambda: len(children) == 2)
    await run.ends(run.container.stop(grace_seconds=0))
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2


GROWS = """
import sys, time
kept = bytearray(int(sys.argv[1]) * 1024**2)
print("grown", flush=True)
time.sleep(1000)
"""


def growing(mebibytes: int) -> str:
    return f"{sys.executable} -c {shlex.quote(GROWS)} {mebibytes}"


def with_limit(quantity: str) -> Any:
    return {"limits": {"memory": quantity}}


async def test_a_container_beyond_its_memory_limit_is_killed_and_started_again_after_a_pause(
    tmp_path: Path,
) -> None:
    """node D2: what a child of the first process takes counts, and all of them go."""
    run = Run(tmp_path, f"{growing(200)} & wait", resources=with_limit("100Mi"))
    await run.until(lambda: isinstance(run.record.state, Waiting) and run.record.restarts == 1)
    assert run.record.state == Waiting("CrashLoopBackOff", "back-off 1s restarting failed container=c")
    last = run.record.last
    assert last is not None
    assert (last.exit_code, last.reason) == (137, "OOMKilled")
    assert last.to_json()["terminated"]["reason"] == "OOMKilled"
    await run.ends(run.container.stop(grace_seconds=0))


async def test_a_container_within_its_memory_limit_runs_on_and_one_that_is_killed_otherwise_is_no_oom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0

    def looking(pid: int, *, enough: int) -> int:
        nonlocal looked
        looked += 1
        return used_bytes(pid, enough=enough)

    monkeypatch.setattr(module, "used_bytes", looking)
    run = Run(tmp_path, f"exec {growing(50)}", policy="Never", resources=with_limit("100Mi"))
    await run.until(lambda: "grown" in run.said)
    so_far = looked
    await run.until(lambda: looked > so_far + 2)
    assert run.container.pid is not None
    os.kill(run.container.pid, signal.SIGKILL)
    ended = await run.ends()
    assert (ended.exit_code, ended.reason) == (137, "Error")


async def test_pages_that_processes_share_are_counted_once(tmp_path: Path) -> None:
    """Workers that are forked from one that has loaded much; what is of a file can be dropped, and does not count."""
    script = """
import os, time
kept = bytearray(100 * 1024**2)
with open(__import__("sys").argv[1], "w+b") as file:
    file.truncate(50 * 1024**2)
    import mmap
    seen = mmap.mmap(file.fileno(), 0)
    for at in range(0, len(seen), 4096):
        seen[at]
for _ in range(3):
    if not os.fork():
        time.sleep(1000)
print("forked", flush=True)
time.sleep(1000)
"""
    run = Run(tmp_path, f"exec {sys.executable} -c {shlex.quote(script)} {tmp_path}/file", policy="Never")
    await run.until(lambda: "forked" in run.said)
    assert run.container.pid is not None
    assert 100 * MIB < used_bytes(run.container.pid) < 140 * MIB
    assert used_bytes(run.container.pid, enough=10**10) > 400 * MIB  # all that is resident, each time
    await run.ends(run.container.stop(grace_seconds=0))
    assert used_bytes(2**22) == 0  # nobody


@pytest.mark.parametrize(
    ("script", "policy", "message"),
    [
        ("echo log; echo file > /dev/termination-log; exit 1", "FallbackToLogsOnError", "file\n"),
        ("echo log; exit 1", "FallbackToLogsOnError", "log"),
        ("echo log; exit 0", "FallbackToLogsOnError", ""),
        ("echo log; exit 1", "File", ""),
        ("for i in $(seq 200); do echo line $i; done; exit 1", "FallbackToLogsOnError", "line 200"),
    ],
)
async def test_the_termination_message(tmp_path: Path, script: str, policy: str, message: str) -> None:
    run = Run(tmp_path, script, policy="Never", terminationMessagePolicy=policy)
    said = (await run.ends()).message
    assert said == message or (
        message == "line 200" and said.endswith(message) and len(said.splitlines()) == 80
    )


async def test_a_program_that_cannot_start_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, "", policy="Never", command=[str(tmp_path)])
    ended = await run.ends()
    assert (ended.exit_code, "cannot start" in ended.message) == (127, True)
    assert os.path.isdir(tmp_path / "c")


async def test_a_sub_path_is_the_file_that_an_earlier_container_has_made_or_a_directory(
    tmp_path: Path,
) -> None:
    file, missing = tmp_path / "keys" / "one", tmp_path / "keys" / "two"
    mounts = {"/keys/one": str(file), "/keys/two": str(missing)}
    run = Run(tmp_path, "test -f /keys/one && test -d /keys/two", policy="Never", mounts=mounts)
    assert not missing.exists(), "a container's mounts are made when it starts"
    file.parent.mkdir()
    file.touch()
    assert (await run.ends()).exit_code == 0


async def test_in_commands_and_probes_the_loopback_is_the_pods_own(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["sh", "-c", "echo probed at 127.0.0.1"]}, "periodSeconds": 1}
    run = Run(tmp_path, f"echo runs at 127.0.0.1; {FOREVER}", livenessProbe=probe)
    probed = tmp_path / "c" / "exec.log"
    await run.until(lambda: probed.exists() and "probed at 127.20.1.5" in probed.read_text())
    assert "runs at 127.20.1.5" in run.said
    await run.ends(run.container.stop(grace_seconds=0))


def test_a_process_may_have_a_name_that_is_no_text() -> None:
    """node D2: a kernel cuts a name after 15 bytes, in the middle of a letter, too."""
    named = "open('/proc/self/comm', 'wb').write(b'\\xc3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", named],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert used_bytes(process.pid) > 0
        process.kill()
