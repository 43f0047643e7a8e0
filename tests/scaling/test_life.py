"""From no replica to as many as fit, and back to none, with every request answered."""

import asyncio

import pytest

from bench.scaler.models import echo_request, echoed, scaling
from localcluster.cluster import LocalCluster
from localcluster.samples import model_pod
from tests.fakes.eventually import eventually
from tests.scaling.callers import CALLS, COUNT, ECHO
from tests.scaling.load import at_once, in_flight
from tests.scaling.support import Owner, client_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEFAULT_HOLDS = {"seldon.io/trtis-hold-bytes": "256Mi"}


async def test_five_in_flight_have_five_replicas_where_five_fit(
    owner: Owner, echo: str, cluster: LocalCluster, pod_address: str
) -> None:
    """KServe's own scenario, on a cluster that is crowded at first."""
    squatters = list(cluster.nodes)[:2]
    for node in squatters:
        spec = {"nodeSelector": {"kubernetes.io/hostname": node}}
        await owner.apply(model_pod(f"squatter-{node}", source=echo, gpu_mem="12Gi", pod_spec=spec))
    for node in squatters:
        await owner.ready_pod(f"squatter-{node}")
    await owner.serve("crowd", source=echo, annotations=scaling(target="1"), gpu_mem="10Gi")
    await owner.leads_to("crowd")
    pending: list[str] = []

    async def watch() -> None:
        while True:
            pending.extend(await owner.pending())
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    client = client_of(owner, "crowd", pod_address)
    async with in_flight(client, echo_request("crowd", sleep_ms=200), 5) as tally:
        await owner.replicas("crowd", 3)

        async def capacity_limited() -> None:
            said = await owner.scaled("crowd")
            assert (said.desired, said.requested, said.capacity_limited) == (5, 3, 2), said
            assert "GPUMemoryInsufficient" in said.message, said

        await eventually(capacity_limited)
        for node in squatters:
            await owner.client.delete(f"/api/v1/namespaces/default/pods/squatter-{node}", grace_seconds=1)
        await owner.replicas("crowd", 5)
    watching.cancel()
    assert tally.lost == []
    assert {(a.status, *echoed(a.body)) for a in tally.answers} == {(200, 1, 2, 3)}
    assert pending == [], "what cannot be placed is not asked for"
    await owner.replicas("crowd", 0)
    assert (await owner.scaled("crowd")).activity == "False"


async def test_a_thousand_first_requests_wait_for_the_first_replica_and_are_answered(
    owner: Owner, echo: str, pod_address: str
) -> None:
    await owner.serve("many", source=echo, annotations=scaling(target="300", max_scale="2"))
    await owner.leads_to("many")
    clients = [client_of(owner, "many", pod_address) for _ in range(1000)]
    tally = await at_once(clients, echo_request("many"))
    assert tally.lost == []
    assert {(a.status, *echoed(a.body)) for a in tally.answers} == {(200, 1, 2, 3)}
    for client in clients:
        await client.close()
    await owner.replicas("many", 0)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_every_protocol_is_held_and_handed_over_byte_for_byte(
    owner: Owner, echo: str, count: str
) -> None:
    annotations = scaling(target="10", clients="*") | DEFAULT_HOLDS
    await asyncio.gather(
        owner.serve(ECHO, source=echo, annotations=annotations),
        owner.serve(COUNT, source=count, annotations=annotations),
    )
    for model in (ECHO, COUNT):
        await owner.leads_to(model)
        await owner.listens(model)

    async def all_calls() -> dict[str, str]:
        made = {name: call(owner.address(model)) for name, (model, call) in CALLS.items()}
        return dict(zip(made, await asyncio.gather(*made.values()), strict=True))

    held = await all_calls()
    await asyncio.gather(*(owner.replicas(model, 1) for model in (ECHO, COUNT)))
    assert held == await all_calls()


@pytest.mark.nightly
async def test_a_long_request_outlives_the_way_to_zero(owner: Owner, echo: str, pod_address: str) -> None:
    """One that comes to the replica when its Service leads to the activators already, and takes longer than all that is
    left to wait for."""
    await owner.serve("long", source=echo, annotations=scaling(target="1"))
    await owner.leads_to("long")
    first = client_of(owner, "long", pod_address)
    await first.ask(echo_request("long"))
    await first.close()
    await owner.replicas("long", 1)
    (pod,) = await owner.ready("long")
    kept = client_of(owner, "long", pod_address)

    async def leads_to_the_pod() -> None:
        assert [one.host for one in owner.backends("long")] == [pod["status"]["podIP"]]

    await eventually(leads_to_the_pod)
    await kept.ask(echo_request("long"))

    async def leads_to_activators() -> None:
        assert {one.port for one in owner.backends("long")} > {9000}

    await eventually(leads_to_activators)
    answer = await kept.ask(echo_request("long", sleep_ms=20_000))
    assert (answer.status, echoed(answer.body)) == (200, [1, 2, 3])
    assert kept.connections == 1
    await kept.close()
    await owner.replicas("long", 0)
