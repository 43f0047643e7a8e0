"""The first data plane, reduced to what costs: aiohttp and grpc.aio, with the checks of their time.

python -m bench.proxy.first_version HTTP_LISTEN GRPC_LISTEN HTTP_UPSTREAM GRPC_UPSTREAM
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp
import grpc
import grpc.aio
from aiohttp import web

from bench.proxy.upstreams import MODEL
from proxy.codecs import protobuf

_LIMIT = asyncio.Semaphore(256)
_NOT_FORWARDED = ("host", "connection", "content-length", "transfer-encoding", "expect")
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Rest:
    def __init__(self, session: aiohttp.ClientSession, upstream: str) -> None:
        self._session, self._upstream = session, upstream

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith(f"/v2/models/{MODEL}"):
            return web.json_response({"error": "unknown model"}, status=404)
        body: Any = request.content
        if "Inference-Header-Content-Length" not in request.headers and request.method == "POST":
            body = await request.read()
            json.loads(body)
        headers = {n: v for n, v in request.headers.items() if n.lower() not in _NOT_FORWARDED}
        if request.content_length is not None and request.method == "POST":
            headers["Content-Length"] = str(request.content_length)
        url = f"http://{self._upstream}{request.raw_path}"
        async with _LIMIT, self._session.request(request.method, url, headers=headers, data=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            response.content_length = answer.content_length
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


class Grpc(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            if protobuf.model_name(request) != MODEL.encode():
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
            async with _LIMIT:
                answer: bytes = await self._channel.unary_unary(details.method, None, None)(request)
                return answer

        async def stream(requests: Any, context: Any) -> Any:
            async for answer in self._channel.stream_stream(details.method, None, None)(requests):
                yield answer

        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


async def main(http: str, listen: str, rest: str, upstream: str) -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session,
        grpc.aio.insecure_channel(upstream, options=_OPTIONS) as channel,
    ):
        application = web.Application(client_max_size=2**40)
        application.router.add_route("*", "/{anything:.*}", Rest(session, rest).serve)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        host, _, port = http.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((Grpc(channel),))
        server.add_insecure_port(listen)
        await server.start()
        await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
