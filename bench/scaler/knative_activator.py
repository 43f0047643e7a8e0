"""Knative's own activator as a program between a client and one upstream of each protocol, built once from its Go module.

What of it is Knative's and what is not stands in knativeactivator/main.go.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.builds import go_build, kept, key_of
from bench.proxy.peers import GRPC, HOST, HTTP, Peer
from bench.proxy.processes import Running, started

_MODULE: Final = Path(__file__).parent / "knativeactivator"
# As its Deployment has it: one CPU at most, and garbage is collected late.
_ENVIRONMENT: Final = {"GOMAXPROCS": "1", "GOGC": "500", "SYSTEM_NAMESPACE": "knative-serving"}


def knative_activator() -> Path:
    """Raises BuildFailed."""
    key = key_of(*(_MODULE / name for name in ("go.mod", "go.sum", "main.go")))
    return kept(
        "knative-activator",
        key,
        lambda to: go_build(".", to, _MODULE, takes="2 to 10 minutes, once"),
    )


def _start(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
    command = [str(knative_activator()), f"{HOST}:{HTTP}", rest, f"{HOST}:{GRPC}", grpc]
    environment = {**os.environ, **_ENVIRONMENT}
    log, ports = directory / "knative.log", [(HOST, HTTP), (HOST, GRPC)]
    with started(command, log=log, ports=ports, env=environment) as one:
        yield one


KNATIVE: Final = Peer("knative", _start)
