"""What the node's Triton says of itself: asked once for all who ask within a while."""

import asyncio
import json
from typing import Any

import pytest

from proxy.policy.refusal import NotServed
from proxy.upstream.queries import Answer, TritonQuestions

TEN_SECONDS = 10.0


class Node:
    """A Triton that counts what it is asked, and answers when it is let; the clock stands unless it is put on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.asked: list[str] = []
        self.answer: Answer | Exception = Answer(200, b'{"version": "2.51"}')
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        monkeypatch.setattr("proxy.upstream.queries.fetch", self._fetch)
        nothing: Any = None
        self.questions = TritonQuestions(nothing, nothing, clock=lambda: self.now)

    def says(self, version: str) -> None:
        self.answer = Answer(200, json.dumps({"version": version}).encode())

    async def version(self) -> str:
        return str((await self.questions.server_metadata())["version"])

    async def _fetch(self, pool: object, where: object, path: str, *, seconds: float) -> Answer:
        self.asked.append(path)
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


async def test_what_the_server_says_of_itself_is_kept_for_a_while(node: Node) -> None:
    assert await node.version() == "2.51"
    node.says("2.52")
    node.now += TEN_SECONDS
    assert await node.version() == "2.51"
    assert node.asked == ["/v2"]
    node.now += 0.1
    assert await node.version() == "2.52"
    assert node.asked == ["/v2", "/v2"]


async def test_many_who_ask_at_once_are_one_question(node: Node) -> None:
    node.may_answer.clear()
    asking = [asyncio.ensure_future(node.version()) for _ in range(100)]
    await asyncio.sleep(0)
    node.may_answer.set()
    async with asyncio.timeout(10):
        assert set(await asyncio.gather(*asking)) == {"2.51"}
    assert node.asked == ["/v2"]


async def test_who_asks_and_goes_away_takes_the_answer_from_nobody(node: Node) -> None:
    node.may_answer.clear()
    first, second = (asyncio.ensure_future(node.version()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    node.may_answer.set()
    async with asyncio.timeout(10):
        assert await second == "2.51"


@pytest.mark.parametrize(
    "answer",
    [
        NotServed("Triton does not answer"),
        Answer(503, b'{"error": "x"}'),
        Answer(200, b"x"),
        Answer(200, b"[]"),
    ],
)
async def test_no_answer_is_not_kept(node: Node, answer: Answer | Exception) -> None:
    node.answer = answer
    for _ in range(2):
        with pytest.raises(NotServed):
            await node.version()
    assert len(node.asked) == 2
    node.says("2.51")
    assert await node.version() == "2.51"
