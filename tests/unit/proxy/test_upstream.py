import asyncio
import json
import socket

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from proxy import upstream as module
from proxy.upstream import Access, Answer, NotServed, Silent, Upstream, open_upstream


class Asked(Upstream):
    """A Triton that serves the model, with the outputs that it has at the moment."""

    def __init__(self) -> None:
        super().__init__(ModelName("own"), None)  # type: ignore[arg-type]
        self.output = "A"
        self.configs = 0
        self.has_config = True
        self.fails: NotServed | None = None

    async def fetch(self, path: str) -> Answer:
        if self.fails is not None:
            raise self.fails
        if not path.endswith("/config"):
            return Answer(200, b"")
        if not self.has_config:
            raise NotServed("Triton does not answer")
        self.configs += 1
        return Answer(200, json.dumps({"output": [{"name": self.output, "dims": ["2"]}]}).encode())


async def until(upstream: Asked, output: str) -> None:
    async with asyncio.timeout(5):
        while not upstream.facts.has_classes(output):
            await asyncio.sleep(0)


@pytest.mark.parametrize("told", [True, False])
async def test_what_is_known_of_the_model_is_read_again_when_it_may_be_another(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """A model that was replaced by another of its name is ready before and after."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 60.0 if told else 0.0)
    monkeypatch.setattr(module, "_FACTS_SECONDS", 60.0 if told else 0.01)
    upstream = Asked()
    polling = asyncio.create_task(upstream.poll())
    await until(upstream, "A")
    upstream.output = "B"
    if told:
        upstream.nudge()
    await until(upstream, "B")
    assert not upstream.facts.has_classes("A")
    assert upstream.is_ready
    polling.cancel()


async def test_a_model_that_is_ready_stays_so_while_its_configuration_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 60.0)
    upstream = Asked()
    upstream.has_config = False
    polling = asyncio.create_task(upstream.poll())
    await asyncio.sleep(0.01)
    assert not upstream.is_ready  # nobody knows yet what it is
    upstream.has_config = True
    upstream.nudge()
    await until(upstream, "A")
    upstream.has_config = False
    for _ in range(3):
        upstream.nudge()
        await asyncio.sleep(0.01)
    assert upstream.is_ready
    assert upstream.facts.has_classes("A")
    polling.cancel()


@pytest.mark.parametrize(
    ("fails", "silence_seconds", "stays"),
    [(Silent("busy"), 60.0, True), (Silent("hangs"), 0.0, False), (NotServed("refused"), 60.0, False)],
)
async def test_a_model_that_was_ready_is_so_while_triton_is_busy_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, fails: NotServed, silence_seconds: float, stays: bool
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SILENCE_SECONDS", silence_seconds)
    upstream = Asked()
    upstream.fails = Silent("busy")
    polling = asyncio.create_task(upstream.poll())
    await asyncio.sleep(0.01)
    assert not upstream.is_ready  # it never was
    upstream.fails = None
    await until(upstream, "A")
    upstream.fails = fails
    await asyncio.sleep(0.01)
    assert upstream.is_ready is stays
    upstream.fails = None
    await asyncio.sleep(0.01)
    assert upstream.is_ready
    polling.cancel()


@pytest.mark.parametrize(("listens", "expected"), [(True, Silent), (False, NotServed)])
async def test_silence_is_told_from_refusal(
    monkeypatch: pytest.MonkeyPatch, listens: bool, expected: type[NotServed]
) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody accepts what the kernel has taken
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1])
        if not listens:
            silent.close()
        async with open_upstream(ModelName("own")) as upstream:
            upstream.access = Access(endpoint, endpoint)
            with pytest.raises(NotServed) as told:
                await upstream.fetch("/v2")
    assert type(told.value) is expected
