"""`berth would-fit -f FILE`: whether a pod that does not exist yet would find a place."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from berth.contract.errors import InvalidPod
from berth.kube.client import open_client
from berth.kube.command import OutputOptions
from berth.kube.errors import KubeError
from berth.runtime import options as opt
from berth.runtime.errors import EXIT_CRASH, CannotStart, ConfigError
from berth.runtime.process import run_process
from binder.cli.answer import judge, tell
from binder.cli.snapshot import read_cluster
from binder.pod.demand import parse_demand

SUMMARY = "Say whether a pod that does not exist yet would fit, and where. Exit code 1 if not."


@dataclass(frozen=True, kw_only=True)
class WouldFitOptions(OutputOptions):
    """Which file."""

    filename: str = opt.option(
        "YAML of a pod, or of anything with a pod template; - for standard input", metavar="FILE", short="-f"
    )
    namespace: str = opt.option(
        "the pod's namespace, where the file names none", default="default", metavar="NAME", short="-n"
    )


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth would-fit`."""
    return run_process("would-fit", SUMMARY, WouldFitOptions, main, argv)


async def main(options: WouldFitOptions, _: asyncio.Event) -> None:
    pod = _read_pod(options)
    try:
        demand = parse_demand(pod, options.key_prefix)
    except InvalidPod as error:
        raise ConfigError(f"--filename: {options.filename}: the pod cannot be placed: {error}") from error
    async with open_client(options.kubeconfig) as client:
        try:
            cluster = await read_cluster(client, options.key_prefix, options.system_namespace)
        except KubeError as error:
            raise CannotStart(f"API server {client.host}: {error}") from error
    answer = judge(cluster, demand, "the pod")
    tell(answer, options)
    if not answer.fits:
        raise SystemExit(EXIT_CRASH)


def _read_pod(options: WouldFitOptions) -> dict[str, Any]:
    """The pod of a file, as the API server would give it: named, and in a namespace."""
    where = f"--filename: {options.filename}"
    try:
        text = sys.stdin.read() if options.filename == "-" else Path(options.filename).read_text()
        documents = [document for document in yaml.safe_load_all(text) if document]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {error}") from error
    pods = [pod for document in documents if (pod := _pod_in(document)) is not None]
    if len(pods) != 1:
        raise ConfigError(f"{where}: {len(pods)} pods or pod templates found; write exactly one")
    meta = pods[0].setdefault("metadata", {})
    return {
        **pods[0],
        "metadata": {"name": "new", "namespace": options.namespace, **meta, "uid": "not-created-yet"},
    }


def _pod_in(document: object) -> dict[str, Any] | None:
    """The document itself or its `spec.template`, if that is a pod."""
    if not isinstance(document, dict) or not isinstance(spec := document.get("spec"), dict):
        return None
    found = document if "containers" in spec else spec.get("template")
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        return None
    return found if isinstance(found["spec"].get("containers"), list) else None
