"""The parts that the options choose, or why they cannot be had."""

import logging
import secrets
from pathlib import Path

from agent.auth import Authenticator, TokenAuthenticator, TrustingAuthenticator
from agent.config import DEFAULT_CAPABILITIES, AgentOptions
from agent.gpus import Gpus, NoGpus
from agent.keys import read_ticket_secret
from agent.mock_gpus import MockGpus
from agent.models import Models
from agent.node_report import NodeFacts
from agent.nvml import NvmlGpus, NvmlMissing
from berth.contract.backends import backend_name
from berth.contract.errors import InvalidValue
from berth.contract.gateway import TICKET_BYTES
from berth.kube.client import KubeClient
from berth.runtime.errors import CannotStart, ConfigError
from berth.triton.keys import TritonKeys

log = logging.getLogger(__name__)


def node_facts(options: AgentOptions) -> NodeFacts:
    backends = _backends(options.backend_directory)
    base = options.capabilities or backends or DEFAULT_CAPABILITIES
    capabilities = {backend_name(one) for one in (*base, *options.extra_capabilities)}
    return NodeFacts(
        server_name=options.server_name,
        capabilities=tuple(sorted(capabilities)),
        backends=backends,
        headroom_bytes=options.headroom,
    )


def authenticator(kind: str, client: KubeClient, models: Models) -> Authenticator:
    if kind == "token":
        return TokenAuthenticator(client, knows=lambda uid: models.get(uid) is not None)
    log.warning(
        "--auth none: any client that reaches the agent's API can stage, load and unload every model of this node"
    )
    return TrustingAuthenticator()


def ticket_secret(directory: Path | None) -> bytes:
    """Without one that is kept, a restart of the agent ends every ticket."""
    if directory is None:
        return secrets.token_bytes(TICKET_BYTES)
    try:
        return read_ticket_secret(directory)
    except InvalidValue as error:
        raise ConfigError(f"--triton-keys: {error}") from error


def triton_keys(directory: Path | None) -> TritonKeys | None:
    if directory is None:
        log.warning("no --triton-keys: any client that reaches Triton's ports can use and change every model")
        return None
    try:
        return TritonKeys.read(directory)
    except InvalidValue as error:
        raise ConfigError(f"--triton-keys: {error}") from error


def gpus(choice: str, models: Models) -> Gpus:
    kind, _, file = choice.partition(":")
    if kind == "mock" and file:
        try:
            return MockGpus(Path(file), models.residents)
        except InvalidValue as error:
            raise ConfigError(f"--nvml: {error}") from error
    if choice == "none":
        return NoGpus()
    if choice == "auto":
        return NvmlGpus()  # without a driver its facts are unknown, and the node takes no models
    if choice == "nvml":
        try:
            return NvmlGpus.open()
        except NvmlMissing as error:
            raise CannotStart(f"--nvml nvml: {error}") from error
    raise ConfigError(f"--nvml: {choice!r} is not one of auto, nvml, none, mock:FILE")


def _backends(directory: Path | None) -> tuple[str, ...]:
    if directory is None:
        return ()
    try:
        return tuple(sorted(entry.name for entry in directory.iterdir() if entry.is_dir()))
    except OSError as error:
        raise ConfigError(f"--backend-directory: {directory}: {error.strerror}") from error
