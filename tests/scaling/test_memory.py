"""Memory as a cache: an idle model stays until another needs its place."""

import pytest

from bench.scaler.models import echo_request, scaling
from tests.fakes.eventually import eventually
from tests.scaling.load import in_flight
from tests.scaling.support import Owner, client_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]


def on(*nodes: str) -> dict[str, object]:
    """A pod's spec that goes to these nodes only."""
    match = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [match]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


async def test_who_needs_room_ends_the_idle_and_never_the_busy(
    owner: Owner, echo: str, pod_address: str
) -> None:
    staying = scaling(target="10", scale_to_zero_pod_retention_period="until-needed")
    places = {"idle": on("gpu-1"), "busy": on("gpu-2"), "needy": on("gpu-1", "gpu-2")}
    for name, spec in places.items():
        await owner.serve(name, source=echo, annotations=staying, gpu_mem="10Gi", pod_spec=spec)
        await owner.leads_to(name)
    idle, busy, needy = (client_of(owner, name, pod_address) for name in places)
    await idle.ask(echo_request("idle"))
    async with in_flight(busy, echo_request("busy", sleep_ms=50), 1) as tally:
        await owner.replicas("busy", 1)

        async def rests() -> None:
            said = await owner.scaled("idle")
            assert (said.desired, said.ready) == (0, 1), said

        await eventually(rests, seconds=60, what="idle to be wanted no more, and to stay")
        (kept,) = await owner.ready("busy")
        answer = await needy.ask(echo_request("needy"))
        assert answer.status == 200
        (placed,) = await owner.ready("needy")
        assert placed["spec"]["nodeName"] == "gpu-1"
        await owner.replicas("idle", 0)
        assert [pod["metadata"]["uid"] for pod in await owner.ready("busy")] == [kept["metadata"]["uid"]]
    assert tally.lost == []
    assert set(tally.statuses()) == {200}
    for client in (idle, needy):
        await client.close()
