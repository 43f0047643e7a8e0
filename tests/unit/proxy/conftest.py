from typing import Any

import pytest

from tests.fakes.data_plane import GrpcPair, triton_at_hand
from tests.fakes.grpc_peers import Both


@pytest.fixture
async def connect() -> Any:
    def make(**more: Any) -> Both:
        both = Both(GrpcPair(**more))
        both.exchange()
        return both

    with triton_at_hand():
        yield make
