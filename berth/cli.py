"""The console script `berth`: one subcommand per process. Imports a process only when it is called."""

import importlib
import sys
from collections.abc import Sequence

from berth import __version__

COMMANDS = {
    "agent": ("agent.app", "publish a node's GPU memory, load and unload its models"),
    "binder": ("binder.app", "place model pods on nodes and GPUs"),
    "loader": ("loader.app", "download a model, hand it to the node's agent and wait until it serves"),
    "proxy": ("proxy.command", "a model pod's proxy: REST and gRPC, isolated and limited"),
    "gateway": (
        "proxy.gateway.app",
        "the node gateway: the only client of the node's Triton, for all its models",
    ),
    "activator": (
        "proxy.activator.app",
        "buffer requests of models without a replica, start them, forward the requests",
    ),
    "scaler": ("scaler.command", "scale models, as Knative's autoscaler does"),
    "scale": ("scaler.scale", "desired, requested and ready replicas of a model, and why"),
    "top": ("binder.cli.top", "GPUs, models, requested and measured memory of the cluster"),
    "why": ("binder.cli.why", "why a pod is pending or does not serve yet, and what comes next"),
    "would-fit": (
        "binder.cli.would_fit",
        "whether a pod that does not exist yet can be scheduled, and where",
    ),
    "upgrade-node": (
        "binder.cli.upgrade_node",
        "replace a node's Triton and agent after its models have been moved away",
    ),
    "demo": ("localcluster.demo", "a tour of all of it on one machine"),
    "keys": ("agent.keys", "make the keys that close a node's Triton to all clients but Berth"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `berth COMMAND …`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in {"-h", "--help", "help"}:
        print(_usage())
        return 0
    if command == "--version":
        print(f"berth {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"berth: {command!r} is not a command; see berth --help", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as error:
        if error.name != "localcluster":
            raise
        print("berth: demo runs from a source checkout only: make demo", file=sys.stderr)
        return 3
    code: int = module.run(arguments[1:])
    return code


def _usage() -> str:
    lines = [f"  {name:12} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: berth COMMAND [--flags]",
            "",
            "GPU sharing for model serving on Kubernetes.",
            "",
            *lines,
            "",
            "berth COMMAND --help shows every flag, its unit, default and environment variable.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
