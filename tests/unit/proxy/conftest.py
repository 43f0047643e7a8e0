from typing import Any

import pytest

from proxy.exchange.breaker import Breaker
from proxy.exchange.model_facts import ModelFacts
from tests.fakes.data_plane import GrpcPair, triton_at_hand
from tests.fakes.grpc_peers import Both


@pytest.fixture
async def connect() -> Any:
    def make(*, breaker: Breaker | None = None, facts: ModelFacts | None = None) -> Both:
        both = Both(GrpcPair(breaker=breaker, facts=facts))
        both.exchange()
        return both

    with triton_at_hand():
        yield make
