"""How long a request may take, and who is told."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from berth.kube import client as module
from berth.kube.client import WRITE_SECONDS
from berth.kube.errors import KubeUnreachable
from tests.fakes.kube import connected


class Server:
    """Notes what each request asks for, and answers when it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, dict(request.query)))
        await self.answers.wait()
        return web.json_response({})


async def test_the_api_server_is_told_how_long_a_write_may_take() -> None:
    server = Server()
    async with connected(server.handle) as client:
        await client.create("/a", {}, fieldManager="x")
        await client.replace("/a", {})
        await client.patch("/a", {})
        await client.apply("/a", {}, manager="m")
        await client.delete("/a")
        await client.get("/a", limit="1")
    limits = [float(query.get("timeout", "0s").removesuffix("s")) for _, query in server.asked]
    assert all(0 < limit < WRITE_SECONDS for limit in limits[:5])
    assert server.asked[0][1]["fieldManager"] == "x"
    assert server.asked[5] == ("GET", {"limit": "1"})


async def test_a_write_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._WRITE_TIMEOUT.total == WRITE_SECONDS
    monkeypatch.setattr(module, "_WRITE_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    server = Server()
    server.answers.clear()
    async with connected(server.handle) as client:
        with pytest.raises(KubeUnreachable, match="Timeout"):
            await client.create("/a", {})
