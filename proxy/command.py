"""`berth proxy`: its two forms, which share their flags."""

import asyncio
from collections.abc import Sequence

import uvloop

from berth.runtime.errors import ConfigError
from berth.runtime.process import run_process
from proxy.config import ProxyOptions

SUMMARY = (
    "One model's REST and gRPC, in one of two forms. "
    "With --agent (and --token-file): the proxy of a model's pod. It hands each connection to the node gateway, "
    "which isolates, limits and reports; the limits below are passed to it. "
    "With --triton-http and --triton-grpc: a gateway of its own for one model, in front of any Triton."
)


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth proxy`."""
    return run_process("proxy", SUMMARY, ProxyOptions, main, argv, loop_factory=uvloop.new_event_loop)


async def main(options: ProxyOptions, stop: asyncio.Event) -> None:
    require_consistent(options)
    if options.agent is not None:
        from proxy.sidecar import app as sidecar

        await sidecar.main(options, stop)
    else:
        from proxy.gateway import standalone

        await standalone.main(options, stop)


def require_consistent(options: ProxyOptions) -> None:
    """Raises ConfigError."""
    if options.agent is None:
        _require_triton(options)
    else:
        _require_sidecar(options)
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")


def _require_triton(options: ProxyOptions) -> None:
    if options.triton_http is None or options.triton_grpc is None:
        raise ConfigError(
            "--triton-http and --triton-grpc are required together, for a gateway of its own; "
            "or --agent, for the proxy of a pod, in front of the node gateway"
        )
    if options.token_file is not None:
        raise ConfigError("--token-file is for the agent; it needs --agent")


def _require_sidecar(options: ProxyOptions) -> None:
    for flag, is_given in (
        ("--triton-http", options.triton_http is not None),
        ("--triton-grpc", options.triton_grpc is not None),
        ("--workers", options.workers != 1),
        ("--max-inflight-bytes", options.max_inflight_bytes != ProxyOptions.max_inflight_bytes),
    ):
        if is_given:
            raise ConfigError(f"{flag} has no use with --agent: the node gateway is what connects to Triton")
