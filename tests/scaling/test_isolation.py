"""What one model's clients can do to another at zero: nothing, and least of all start it."""

import asyncio

import pytest

from bench.scaler.models import echo_request, echoed, scaling
from bench.scaler.traffic import Client, Lost, request_of
from localcluster.cluster import LocalCluster
from tests.scaling.support import Owner, client_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Longer than a decision takes to be made and written.
_NOTHING_SECONDS = 4.0
_ANSWER_SECONDS = 3.0


async def test_nobody_wakes_a_model_but_who_may_ask_it_for_inference(
    owner: Owner, echo: str, pod_address: str, cluster: LocalCluster
) -> None:
    for name in ("alice", "other"):
        await owner.serve(name, source=echo, annotations=scaling(target="1"))
        await owner.leads_to(name)
    stranger = await owner.client_pod("tenant-b")
    own, others = (
        client_of(owner, "alice", pod_address),
        [client_of(owner, "alice", stranger) for _ in range(20)],
    )
    tries = await asyncio.gather(*(outcome(other, echo_request("alice")) for other in others))
    assert 200 not in tries
    questions = [
        *(("GET", path) for path in ("/v2/health/ready", "/v2/health/live", "/v2", "/v2/models/alice")),
        *(("GET", path) for path in ("/v2/models/alice/ready", "/v2/models/alice/config")),
        *(("GET", path) for path in ("/v2/models/other", "/metrics", "/")),
        *(("POST", path) for path in ("/v2/repository/index", "/v2/repository/models/alice/load")),
    ]
    for method, path in questions:
        await outcome(own, request_of(method, path, b""))
    for stolen in (echo_request("other"), echo_request("alice/../other")):
        assert await outcome(own, stolen) in (0, 400, 404)
    smuggled = request_of("POST", "/v2/models/other/infer", b"0\r\n\r\n", Transfer_Encoding="chunked")
    assert await outcome(own, smuggled) in (0, 400, 404)
    await own.close()
    await asyncio.sleep(_NOTHING_SECONDS)
    for name in ("alice", "other"):
        assert (await owner.deployment(name))["spec"]["replicas"] == 0, name
        assert not await owner.pods(name)
    answer = await own.ask(echo_request("alice"))
    assert (answer.status, echoed(answer.body)) == (200, [1, 2, 3])
    assert (await owner.deployment("other"))["spec"]["replicas"] == 0
    await own.close()


async def outcome(client: Client, request: bytes) -> int:
    """The status; 0 for a connection that ended, or has no answer."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return (await client.ask(request)).status
    except (Lost, TimeoutError):
        return 0
