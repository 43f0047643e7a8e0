"""The agent's options, each default with its reason."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Address, Endpoint, UnixSocket, parse_address
from berth.contract.errors import InvalidValue
from berth.contract.report import CodeRule
from berth.kube.options import KubeOptions
from berth.runtime import options as opt

# The backends of NVIDIA's Triton image; Seldon Core 2 lists the same for its Triton server.
DEFAULT_CAPABILITIES = ("dali", "onnxruntime", "openvino", "python", "pytorch", "tensorrt", "triton")


def _node_name(text: str) -> str:
    """Raises InvalidValue: without a name the API server would answer of all nodes, and of pods without one."""
    if not text.strip():
        raise InvalidValue("is empty; the name of this agent's Node is expected")
    return text


def _socket(text: str) -> UnixSocket:
    """Raises InvalidValue: its messages open every model of the node, so they cross no network."""
    address = parse_address(text)
    if not isinstance(address, UnixSocket):
        raise InvalidValue(f"{text!r} is not unix:PATH")
    return address


def _code_rule(text: str) -> CodeRule:
    return CodeRule(opt.choice(*(rule.value for rule in CodeRule))(text))


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """The repository, and how full its disk may get."""

    repository: Path = opt.option(
        "directory of Berth's model repository; Triton reads DIR/models", parse=Path, metavar="DIR"
    )
    max_model_bytes: int = opt.option(
        "the largest model that is staged",
        default=512 * 1024**3,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="512Gi",
    )
    # A kubelet evicts pods when less than 10 % is free, and deletes images when it is less than 15 %.
    keep_free: float = opt.option(
        "share of the repository's file system, bytes and inodes, that is never filled with models",
        default=0.15,
        parse=opt.percentage,
        metavar="PERCENT",
        shown="15%",
    )


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """The node's GPUs."""

    nvml: str = opt.option(
        "where GPU facts come from: nvml, none, mock:FILE (a YAML scenario), or auto (nvml once it is there)",
        default="auto",
        metavar="auto|nvml|none|mock:FILE",
    )
    # CUDA's allocators grow on the first requests after a load; this much stays free on every GPU for them.
    headroom: int = opt.option(
        "GPU memory kept free on every GPU",
        default=256 * 1024**2,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="256Mi",
    )


@dataclass(frozen=True, kw_only=True)
class TritonOptions:
    """The node's Triton, and what it serves."""

    triton_grpc: Address = opt.address("Triton's gRPC port or socket", default="127.0.0.1:8001")
    triton_keys: Path | None = opt.option(
        "directory with Triton's keys and the tickets' secret, made by berth keys; without it Triton is open",
        default=None,
        parse=Path,
        metavar="DIR",
    )
    server_name: str = opt.option("the name that pods pin themselves to", default="triton", metavar="NAME")
    capabilities: tuple[str, ...] = opt.option(
        "what this Triton can serve; without it the backends of --backend-directory, or NVIDIA's image",
        default=(),
        parse=opt.words,
        metavar="A,B",
    )
    extra_capabilities: tuple[str, ...] = opt.option(
        "capabilities besides those", default=(), parse=opt.words, metavar="A,B"
    )
    backend_directory: Path | None = opt.option(
        "Triton's backend directory, where the agent can see it", default=None, parse=Path, metavar="DIR"
    )
    code: CodeRule = opt.option(
        "models with code that Triton runs (python, native libraries): none; namespace (a node that holds one "
        "holds models of that namespace only); or any",
        default=CodeRule.NAMESPACE,
        parse=_code_rule,
        metavar="none|namespace|any",
        shown=CodeRule.NAMESPACE.value,
    )
    # A large model takes minutes to read from disk and move to the GPU.
    load_timeout: float = opt.seconds("the longest that one load may take", default=600.0, minimum=1.0)
    unload_timeout: float = opt.seconds(
        "the longest to wait for a model to be gone", default=120.0, minimum=1.0
    )


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """Who reaches the agent, and the gateway."""

    listen: Endpoint = opt.endpoint("the agent's API", default="0.0.0.0:8470")
    admin_listen: Endpoint = opt.endpoint("health and metrics", default="0.0.0.0:8471")
    auth: str = opt.option(
        "who may call the API: holders of a pod's token, or any client (for local use only)",
        default="token",
        parse=opt.choice("token", "none"),
        metavar="token|none",
    )
    gateway: Endpoint | None = opt.endpoint(
        "the gateway's endpoint for this node's pods; without it pods get none"
    )
    gateway_control: UnixSocket | None = opt.option(
        "the gateway's control socket, over which the agent lists the node's replicas; without it no gateway is used",
        default=None,
        parse=_socket,
        metavar="unix:PATH",
    )


@dataclass(frozen=True, kw_only=True)
class AgentOptions(ApiOptions, TritonOptions, GpuOptions, StoreOptions, KubeOptions):
    """`berth agent --help`."""

    node_name: str = opt.option("the node that this agent speaks for", parse=_node_name, metavar="NAME")
    # A kubelet's: one renewal in four may be lost before the Lease (4 x) ends.
    heartbeat_seconds: float = opt.seconds("time between two heartbeats", default=10.0, minimum=1.0)
    poll_seconds: float = opt.seconds("time between two looks at GPUs and Triton", default=2.0, minimum=0.1)
