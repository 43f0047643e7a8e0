"""Paths of the API."""

from berth.kube import paths


def test_paths_are_those_of_the_api() -> None:
    assert paths.NODES == "/api/v1/nodes"
    assert paths.PODS == "/api/v1/pods"
    assert paths.LEASES == "/apis/coordination.k8s.io/v1/leases"
    assert paths.NAMESPACES == "/api/v1/namespaces"
    assert paths.VOLUMES == "/api/v1/persistentvolumes"
    assert paths.CLAIMS == "/api/v1/persistentvolumeclaims"
    assert paths.STORAGE_CLASSES == "/apis/storage.k8s.io/v1/storageclasses"
    assert paths.BUDGETS == "/apis/policy/v1/poddisruptionbudgets"
    assert paths.TOKEN_REVIEWS == "/apis/authentication.k8s.io/v1/tokenreviews"
    assert paths.node("n") == "/api/v1/nodes/n"
    assert paths.pods("t") == "/api/v1/namespaces/t/pods"
    assert paths.pod("t", "p") == "/api/v1/namespaces/t/pods/p"
    assert paths.events("t") == "/api/v1/namespaces/t/events"
    assert paths.leases("t") == "/apis/coordination.k8s.io/v1/namespaces/t/leases"
    assert paths.lease("t", "l") == "/apis/coordination.k8s.io/v1/namespaces/t/leases/l"
