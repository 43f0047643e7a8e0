"""The commands that read the cluster once, run before an API server that is only read."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from berth.contract.keys import agent_lease_namespace
from berth.kube import paths
from berth.kube.command import OutputOptions
from berth.kube.times import micro_time
from berth.runtime.options import parse_options
from binder.cli import top, why, would_fit
from tests.fakes.objects import node
from tests.fakes.reader import Reader

COMMANDS = {
    "top": (OutputOptions, top.main),
    "why": (why.WhyOptions, why.main),
    "would-fit": (would_fit.WouldFitOptions, would_fit.main),
}
LEASES = paths.leases(agent_lease_namespace("berth-system"))
BARE = "spec: {containers: [{name: c, resources: {limits: {seldon.io/trtis-gpu-mem: 3Gi}}}]}"


def read_by_commands(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """The API server of all three commands."""
    made = Reader()
    for module in (top, why, would_fit):
        monkeypatch.setattr(module, "open_client", made.open)
    return made


async def call(command: str, *argv: str) -> None:
    kind, main = COMMANDS[command]
    await main(parse_options(kind, process=command, summary="", argv=argv, environ={}), asyncio.Event())  # type: ignore[operator]


def add_node(api: Reader, name: str, *, beats: bool = True, **more: Any) -> None:
    api.add(paths.NODES, node(name, **more))
    if beats:
        spec = {"renewTime": micro_time(datetime.now(UTC)), "leaseDurationSeconds": 40}
        lease = {"metadata": {"name": f"berth-agent-{name}"}, "spec": spec}
        api.add(LEASES, lease)


def pod_file(folder: Path, text: str) -> str:
    path = folder / "pod.yaml"
    path.write_text(text)
    return str(path)
