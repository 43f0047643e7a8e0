"""The options of every process that talks to the API server."""

from dataclasses import dataclass

from berth.contract.keys import DEFAULT_PREFIX, Keys
from berth.runtime.options import CommonOptions, option


@dataclass(frozen=True, kw_only=True)
class KubeOptions(CommonOptions):
    """Where the API server is, where Berth's own objects live, and how keys begin."""

    kubeconfig: str | None = option(
        "kubeconfig file; without one KUBECONFIG is read, then the pod's ServiceAccount",
        default=None,
        metavar="FILE",
    )
    system_namespace: str = option(
        "namespace of Berth's parts and their Leases; the agents' are in NAME-nodes",
        default="berth-system",
        metavar="NAME",
    )
    key_prefix: Keys = option(
        "prefix of annotations and of the GPU memory resource",
        default=Keys(),
        parse=Keys,
        metavar="PREFIX",
        shown=DEFAULT_PREFIX,
    )
