"""Every Kubernetes key that Berth reads or writes, built from one configurable prefix."""

import re
from dataclasses import dataclass

from berth.contract.errors import InvalidValue

DEFAULT_PREFIX = "seldon.io/trtis-"
SCHEDULER_NAME = "trtis-scheduler"
AGENT_AUDIENCE = "berth-agent"

_PREFIX = re.compile(r"[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?/([A-Za-z0-9]([A-Za-z0-9._-]{0,30}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of docs/architecture.md. The default prefix is the proof of concept's."""

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidValue(f"{self.prefix!r} is not a key prefix; write e.g. {DEFAULT_PREFIX}")

    @property
    def gpu_mem(self) -> str:
        """Extended resource in container limits: GPU memory in bytes, as a quantity."""
        return f"{self.prefix}gpu-mem"

    @property
    def model_id(self) -> str:
        """Pod annotation: the model's identity; at most one live pod of a namespace with it per node."""
        return f"{self.prefix}model-id"

    @property
    def model_name(self) -> str:
        """Pod annotation: the name that clients call it by, where it differs from the id."""
        return f"{self.prefix}model-name"

    @property
    def requirements(self) -> str:
        """Pod annotation: comma list, each of which must be among the node's capabilities."""
        return f"{self.prefix}requirements"

    @property
    def server(self) -> str:
        """Pod annotation: pin to the nodes of one server name."""
        return f"{self.prefix}server"

    @property
    def gpu_count(self) -> str:
        """Pod annotation: how many distinct GPUs of one node, each with the requested bytes."""
        return f"{self.prefix}gpu-count"

    @property
    def gpu_product(self) -> str:
        """Pod annotation: comma list of GPU products, any of which will do."""
        return f"{self.prefix}gpu-product"

    @property
    def gpu(self) -> str:
        """Pod annotation written by the binder in the Binding: the chosen GPU."""
        return f"{self.prefix}gpu"

    @property
    def loaded_condition(self) -> str:
        """Pod condition: False, with the reason, once no other node is tried for a failed load."""
        return f"{self.prefix}model-loaded"

    @property
    def scaled(self) -> str:
        """Deployment annotation written by the scaler: the desired scale and its status, as JSON
        (berth.contract.scaling.Scaled)."""
        return f"{self.prefix}scaled"

    @property
    def overflow_pods(self) -> str:
        """Deployment annotation: so many replicas may be Pending for lack of capacity, for a node autoscaler to see."""
        return f"{self.prefix}overflow-pods"

    @property
    def hold_timeout(self) -> str:
        """Deployment annotation: seconds (or a Go duration) that a request is buffered while no replica is ready; at most 600 s."""
        return f"{self.prefix}hold-timeout"

    @property
    def hold_requests(self) -> str:
        """Deployment annotation: how many requests are buffered at once."""
        return f"{self.prefix}hold-requests"

    @property
    def hold_bytes(self) -> str:
        """Deployment annotation: the memory that they may take together, as a quantity."""
        return f"{self.prefix}hold-bytes"

    @property
    def clients(self) -> str:
        """Deployment annotation: comma list of namespaces whose pods may call an idle model, or `*`; its own
        where absent."""
        return f"{self.prefix}clients"

    @property
    def node_total(self) -> str:
        """Node annotation: integer bytes, sum over healthy GPUs."""
        return f"{self.prefix}gpu-mem-total"

    @property
    def node_used(self) -> str:
        """Node annotation: integer bytes in use over healthy GPUs, as NVML counts them."""
        return f"{self.prefix}gpu-mem-used"

    @property
    def node_util(self) -> str:
        """Node annotation: mean GPU utilisation, 0 to 1 with two decimals."""
        return f"{self.prefix}gpu-util"

    @property
    def report(self) -> str:
        """Node annotation: the node's report as JSON (berth.contract.report)."""
        return f"{self.prefix}report"

    @property
    def lift_quarantine(self) -> str:
        """Node annotation, written by an operator: comma list of digests (or their beginnings, of at least
        8 characters) whose quarantine on this node ends, or `all`."""
        return f"{self.prefix}lift-quarantine"

    @property
    def cordoned_by(self) -> str:
        """Node annotation: `berth upgrade-node` has cordoned this node, and is to uncordon it."""
        return f"{self.prefix}cordoned-by"

    @property
    def report_behind(self) -> str:
        """Annotation of an agent's Lease: why the report on the node is not the current one. Absent while
        it is; with it the node's facts are stale, however fresh the heartbeat."""
        return f"{self.prefix}report-behind"


def agent_lease_name(node_name: str) -> str:
    """The Lease that an agent renews as its heartbeat."""
    return f"berth-agent-{node_name}"


def agent_lease_namespace(system_namespace: str) -> str:
    """Where the agents' Leases are: apart from the one that the binders elect their leader by, so that an
    agent's rights do not reach that one."""
    return f"{system_namespace}-nodes"
