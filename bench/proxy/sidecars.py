"""Sidecars that are not measured: two ports whose connections go to a gateway, each under the next of some tickets.

python -m bench.proxy.sidecars GATEWAY REST_LISTEN GRPC_LISTEN TICKET…
"""

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing

import uvloop

from berth.contract.endpoint import Endpoint
from proxy.wire.preamble import ACCEPTED, Kind, Preamble

_BLOCK = 256 * 1024


def _sidecar(
    gateway: Endpoint, kind: Kind, tickets: Iterator[bytes]
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(gateway.host, gateway.port, limit=_BLOCK)
        with closing(writer), closing(back):
            back.write(Preamble(kind, next(tickets)).to_bytes())
            if await there.read(1) == ACCEPTED:
                await asyncio.wait(
                    [
                        asyncio.ensure_future(_pass_on(reader, back)),
                        asyncio.ensure_future(_pass_on(there, writer)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )

    return client


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_BLOCK):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return


async def _main(gateway: str, rest: str, grpc: str, *tickets: str) -> None:
    there = Endpoint.parse(gateway)
    for listen, kind in ((Endpoint.parse(rest), Kind.REST), (Endpoint.parse(grpc), Kind.GRPC)):
        sidecar = _sidecar(there, kind, itertools.cycle(map(bytes.fromhex, tickets)))
        await asyncio.start_server(sidecar, listen.host, listen.port, limit=_BLOCK, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:]))
