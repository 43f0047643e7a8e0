"""Writes about one pod and no successor of its name: evictions and the nominated node."""

import pytest

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.kube.errors import KubeError, response_error
from binder.loop.pod_writes import evict, set_nominated_node
from tests.fakes.kube import Answers

REF = PodRef("team", "p1", PodUid("p1"))


@pytest.mark.parametrize("dry_run", [True, False])
async def test_an_eviction_is_of_this_pod_and_a_dry_run_where_it_is_to_be(dry_run: bool) -> None:
    api = Answers({})
    await evict(api, REF, dry_run=dry_run)  # type: ignore[arg-type]
    ((path, body),) = api.calls
    assert path == "/api/v1/namespaces/team/pods/p1/eviction"
    dry = {"dryRun": ["All"]} if dry_run else {}
    assert body == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "p1", "namespace": "team"},
        "deleteOptions": {"preconditions": {"uid": "p1"}, **dry},
    }


async def test_a_pod_that_is_gone_already_is_evicted() -> None:
    await evict(Answers(response_error(404, "NotFound", "")), REF)  # type: ignore[arg-type]
    with pytest.raises(KubeError, match="429"):
        await evict(Answers(response_error(429, "", "")), REF)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "written"), [("n1", "n1"), ("", None)])
async def test_the_nominated_node_is_said_of_this_pod(name: str, written: str | None) -> None:
    api = Answers({})
    await set_nominated_node(api, REF, name)  # type: ignore[arg-type]
    path, body = api.calls[0]
    assert path == "/api/v1/namespaces/team/pods/p1/status"
    assert body == {"metadata": {"uid": "p1"}, "status": {"nominatedNodeName": written}}
