"""Paths of the API objects that Berth touches."""

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
LEASES = "/apis/coordination.k8s.io/v1/leases"
NAMESPACES = "/api/v1/namespaces"
VOLUMES = "/api/v1/persistentvolumes"
CLAIMS = "/api/v1/persistentvolumeclaims"
STORAGE_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
DEPLOYMENTS = "/apis/apps/v1/deployments"
SERVICES = "/api/v1/services"
ENDPOINT_SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


def node(name: str) -> str:
    return f"{NODES}/{name}"


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def pod(namespace: str, name: str) -> str:
    return f"{pods(namespace)}/{name}"


def events(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/events"


def leases(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def lease(namespace: str, name: str) -> str:
    return f"{leases(namespace)}/{name}"


def deployment(namespace: str, name: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"


def endpoint_slice(namespace: str, name: str) -> str:
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{name}"
