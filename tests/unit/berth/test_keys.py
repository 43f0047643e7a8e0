"""The keys of annotations and resources."""

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.keys import AGENT_AUDIENCE, SCHEDULER_NAME, Keys, agent_lease_name

KEYS = Keys()


def test_the_default_keys_are_those_of_the_proof_of_concept() -> None:
    assert KEYS.gpu_mem == "seldon.io/trtis-gpu-mem"
    assert KEYS.model_id == "seldon.io/trtis-model-id"
    assert KEYS.node_total == "seldon.io/trtis-gpu-mem-total"


@pytest.mark.parametrize("prefix", ["", "seldon", "Seldon.io/x", "/x", "a/b/c", "a b/", "x" * 300 + "/"])
def test_a_prefix_that_no_key_may_have(prefix: str) -> None:
    with pytest.raises(InvalidValue, match="not a key prefix"):
        Keys(prefix)


def test_every_key_begins_with_the_prefix() -> None:
    names = {
        "gpu_mem": "gpu-mem",
        "model_id": "model-id",
        "model_name": "model-name",
        "requirements": "requirements",
        "server": "server",
        "gpu_count": "gpu-count",
        "gpu_product": "gpu-product",
        "gpu": "gpu",
        "loaded_condition": "model-loaded",
        "node_total": "gpu-mem-total",
        "node_used": "gpu-mem-used",
        "node_util": "gpu-util",
        "report": "report",
    }
    for prefix in ("seldon.io/trtis-", "example.org/"):
        assert {name: getattr(Keys(prefix), name) for name in names} == {
            name: prefix + end for name, end in names.items()
        }
    assert Keys().prefix == "seldon.io/trtis-"
    # Users write these in manifests, and the API server in tokens.
    assert (SCHEDULER_NAME, AGENT_AUDIENCE) == ("trtis-scheduler", "berth-agent")
    assert agent_lease_name("node-1") == "berth-agent-node-1"
