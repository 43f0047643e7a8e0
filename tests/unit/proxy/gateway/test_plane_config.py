"""What each of several workers may take."""

from dataclasses import replace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.runtime.options import CommonOptions
from proxy.gateway.plane_config import PlaneConfig, Tenancy
from proxy.gateway.registry import Ceilings
from proxy.request.endpoint import UpstreamEndpoint

NOWHERE = Endpoint("127.0.0.1", 1)
CEILINGS = Ceilings(
    request_timeout_seconds=100, max_json_bytes=50, max_request_bytes=400, max_inflight_bytes=1000
)
LIMITS = ReplicaLimits(
    request_timeout_seconds=30, max_json_bytes=50, max_request_bytes=400, max_inflight_bytes=800
)


def config(workers: int, *, tenancy: Tenancy | None) -> PlaneConfig:
    return PlaneConfig(
        logs=CommonOptions(),
        triton=UpstreamEndpoint(NOWHERE, NOWHERE),
        ports=(),
        workers=workers,
        triton_rest_requests=64,
        tenancy=tenancy,
    )


TENANCY = Tenancy(ceilings=CEILINGS, memory_budget=1000)


@pytest.mark.parametrize(
    ("tenancy", "workers", "changes"),
    [
        (None, 1, {}),
        (TENANCY, 1, {}),
        (None, 4, {"max_inflight_bytes": 200}),
        # No request is allowed that its worker could never admit.
        (TENANCY, 4, {"max_inflight_bytes": 200, "max_request_bytes": 200}),
    ],
)
def test_all_workers_together_keep_to_a_replicas_limits(
    tenancy: Tenancy | None, workers: int, changes: dict[str, Any]
) -> None:
    assert config(workers, tenancy=tenancy).worker_limits(LIMITS) == replace(LIMITS, **changes)


@pytest.mark.parametrize(
    ("concurrency", "tenancy", "shares"), [(0, None, False), (1, None, True), (0, TENANCY, True)]
)
def test_requests_are_counted_together_where_there_is_or_may_come_a_limit(
    concurrency: int, tenancy: Tenancy | None, shares: bool
) -> None:
    assert config(2, tenancy=tenancy).shares_limit(ReplicaLimits(container_concurrency=concurrency)) is shares
