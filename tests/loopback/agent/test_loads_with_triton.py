"""Loads in a real Triton: what it is at already, what comes late, and what it says of a load that fails."""

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from berth.contract.report import Failure, ModelState
from berth.triton.admin import IndexState
from tests.fakes.agent_node import on_server
from tests.loopback.agent.served import CONFIG, Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("triton")) as found:
        yield found


async def test_an_agent_that_starts_during_a_load_waits_for_it(served: Served) -> None:
    before = served.node()
    model = await before.stage("s1", files=served.files("s1", work="time.sleep(3)"))
    before.lifecycle.start_load(model)
    await served.until("s1", IndexState.LOADING)
    await before.lifecycle.close()
    after = served.node()
    found = after.models.adopt(next(r for r in after.repository.records().values() if r is not None))
    found.pod_lives = True
    await after.lifecycle.start_load(found)
    assert (found.state, served.loads("s1")) == (ModelState.READY, 1)
    await after.lifecycle.start_load(found)
    assert served.loads("s1") == 1


async def test_what_is_being_unloaded_is_gone_before_it_is_loaded(served: Served) -> None:
    node = served.node()
    model = await node.stage("s3", files=served.files("s3", finalize=2))
    await node.lifecycle.start_load(model)
    await served.admin.unload(on_server("s3"), timeout_seconds=5)
    assert await served.state("s3") is IndexState.UNLOADING
    began = time.monotonic()
    await node.lifecycle.start_load(model)
    assert (model.state, served.loads("s3")) == (ModelState.READY, 2)
    assert time.monotonic() - began > 1.5


BROKEN = {
    "raises": ({"work": "raise RuntimeError('no weights here')"}, Failure.TRANSIENT, "no weights here"),
    "memory": (
        {"work": "raise RuntimeError('CUDA error: out of memory')"},
        Failure.CAPACITY,
        "out of memory",
    ),
    "module": ({"work": "import torch9"}, Failure.INVALID_MODEL, "No module named 'torch9'"),
    "syntax": ({"work": "def ("}, Failure.INVALID_MODEL, "SyntaxError"),
    "network": (
        {"work": "import socket; socket.create_connection(('127.0.0.1', 1))"},
        Failure.TRANSIENT,
        "Connection refused",
    ),
    "backend": ({"config": CONFIG.replace("python", "tensorflow9")}, Failure.INVALID_MODEL, "tensorflow9"),
    "dims": ({"config": CONFIG.replace("dims: [ 1 ]", "dims: [ -7 ]")}, Failure.INVALID_MODEL, "dims[0]: -7"),
    "version": (
        {"config": CONFIG + "version_policy { specific { versions: [ 7 ] } }"},
        Failure.INVALID_MODEL,
        "version_policy: of versions 7 none is there",
    ),
    "poll": (
        {"config": CONFIG + "response_cache { enable: true } model_transaction_policy { decoupled: true }"},
        Failure.TRANSIENT,
        "failed to poll from model repository (the cause is in Triton's log",
    ),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
async def test_why_a_load_failed(served: Served, kind: str) -> None:
    changes, failure, text = BROKEN[kind]
    node = served.node()
    model = await node.stage(kind, files=served.files(kind, **changes))  # type: ignore[arg-type]
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, failure), model.reason
    assert text in model.reason
    kept = on_server(kind) in node.repository.records()
    assert kept is (failure is not Failure.INVALID_MODEL)
