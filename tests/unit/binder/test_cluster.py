"""What of a pod's object is kept in memory: all that a decision depends on."""

import copy

from berth.contract.ids import NodeName
from berth.contract.pod import has_ended
from binder.cache.reservations import bound_reservation
from binder.engine.cluster import slim
from binder.pod.conditions import reported_message
from binder.pod.demand import parse_demand
from binder.pod.topology_terms import required_anti_affinity
from tests.fakes.objects import KEYS, pod
from tests.fakes.whole_pod import everything


def test_what_is_left_out_of_the_mirror_changes_nothing() -> None:
    whole = everything()
    kept = slim(copy.deepcopy(whole))
    assert parse_demand(kept, KEYS) == parse_demand(whole, KEYS)
    assert parse_demand(kept, KEYS).nominated == parse_demand(whole, KEYS).nominated == "n2"
    assert bound_reservation(kept, NodeName("n1"), KEYS) == bound_reservation(whole, NodeName("n1"), KEYS)
    assert required_anti_affinity(kept) == required_anti_affinity(whole) != ()
    assert reported_message(kept) == reported_message(whole) == "no room"
    assert has_ended(kept)
    assert kept["metadata"]["resourceVersion"] == "5"


def test_what_no_decision_depends_on_is_not_kept() -> None:
    kept = str(slim(everything()))
    for waste in ("managedFields", "serviceAccountName", "env", "args", "image", "podIP"):
        assert waste not in kept
    usual = pod(requests={"cpu": "1"})
    usual["status"]["containerStatuses"] = [
        {"name": "proxy", "resources": {"requests": {"cpu": "1"}}, "allocatedResources": {"cpu": "1"}},
        {"name": "unheard of"},
    ]
    assert "containerStatuses" not in slim(usual)["status"]
    assert slim({"metadata": {"name": "bare"}}) == {"metadata": {"name": "bare"}, "spec": {}, "status": {}}
