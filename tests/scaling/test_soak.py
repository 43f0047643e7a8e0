"""A minute of days and nights for three models (BERTH_SOAK_SECONDS=3600: an hour of them). What the deciders saw is
recorded, and Knative's own decider is asked the same."""

import asyncio
import math
import os
import time
from pathlib import Path
from typing import Final

import pytest

from bench.scaler.models import echo_request, echoed, scaling
from localcluster.cluster import LocalCluster
from tests.oracles.equality import differences
from tests.scaling.load import Tally, load
from tests.scaling.support import Owner, client_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

_SECONDS: Final = float(os.environ.get("BERTH_SOAK_SECONDS", "60"))
_DAY_SECONDS: Final = 40.0
# At noon, of all models together.
_MOST_PER_SECOND: Final = 60.0
_GROWTH_MEBIBYTES: Final = 40.0
_MODELS: Final = ("dawn", "noon", "dusk")
_PARTS: Final = ("scaler", "activator")


@pytest.mark.timeout(_SECONDS + 300)
async def test_days_and_nights(
    owner: Owner, echo: str, pod_address: str, cluster: LocalCluster, records: Path
) -> None:
    for name in _MODELS:
        await owner.serve(name, source=echo, annotations=scaling(target="2", max_scale="3"), gpu_mem="3Gi")
        await owner.leads_to(name)
    tallies = {name: Tally() for name in _MODELS}
    pending: list[str] = []
    before = sizes(cluster)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for place, name in enumerate(_MODELS):
            offset = place * _DAY_SECONDS / len(_MODELS)
            group.create_task(days(owner, name, pod_address, tallies[name], began, offset))
        while time.monotonic() - began < _SECONDS:
            pending += await owner.pending()
            await asyncio.sleep(0.5)
    assert pending == []
    for name, tally in tallies.items():
        assert tally.lost == [], (name, tally.lost[:3])
        assert {(a.status, *echoed(a.body)) for a in tally.answers} == {(200, 1, 2, 3)}, name
    grown = {name: size - before[name] for name, size in sizes(cluster).items() if name in before}
    assert max(grown.values()) < _GROWTH_MEBIBYTES, grown
    decisions = 0
    for record in sorted(records.iterdir()):
        compared = await asyncio.to_thread(differences, record.read_text().splitlines(keepends=True))
        assert compared.differing == []
        decisions += compared.decisions
    assert decisions >= _SECONDS, "each model has one each two seconds"


async def days(
    owner: Owner, name: str, source: str, tally: Tally, began: float, offset_seconds: float
) -> None:
    """Load that rises and falls, and is none at night."""
    client, request = client_of(owner, name, source), echo_request(name, sleep_ms=10)
    while (elapsed := time.monotonic() - began) < _SECONDS:
        height = math.sin(2 * math.pi * (elapsed + offset_seconds) / _DAY_SECONDS)
        if height <= 0:
            await asyncio.sleep(1)
            continue
        per_second = max(height * _MOST_PER_SECOND / len(_MODELS), 1.0)
        async with load(client, request, per_second=per_second, tally=tally):
            await asyncio.sleep(2)


def sizes(cluster: LocalCluster) -> dict[str, float]:
    """Of scalers and activators, in MiB."""
    return {name: size for name, size in cluster.rss_mebibytes().items() if name.split()[0] in _PARTS}
