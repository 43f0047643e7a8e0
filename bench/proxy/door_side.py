"""What a door has around it, and as little of it as there can be: an agent that tells, a gateway that answers.

    python -m bench.proxy.door_side AGENT_PORT GATEWAY_PORT

The gateway takes any ticket and answers whatever it reads with the same small answer, as it does without a
preamble, so that nginx may stand where the door stands.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop

from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from proxy.codecs.preamble import ACCEPTED, PREAMBLE_BYTES, Kind, read_preamble
from proxy.codecs.report import DRAINED, Told, says
from proxy.exchange.traffic import Figures

_BODY = b'{"model_name":"mine","outputs":[{"name":"OUT","shape":[3],"datatype":"UINT8","data":[1,2,3]}]}'
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_BODY),
    _BODY,
)


class _Answering(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._reports = self._is_known = False

    def data_received(self, data: bytes) -> None:
        if not self._is_known:
            self._is_known = True
            if data.startswith(b"BERTH"):
                self._transport.write(ACCEPTED)
                self._reports = read_preamble(data).kind is Kind.REPORT
                data = data[PREAMBLE_BYTES:]
                if self._reports:
                    self._tell()
        if self._reports:
            if says(data.splitlines()[-1] if data else b"", "drain"):
                self._transport.write(DRAINED)
        elif data:
            self._transport.write(_ANSWER)

    def _tell(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(Told(None, Figures().to_json()).to_line())
            asyncio.get_running_loop().call_later(1.0, self._tell)


class _Agent(NodeAgentServicer):
    def __init__(self, gateway: str) -> None:
        self._gateway = gateway

    async def WatchModel(self, request: Any, context: Any) -> AsyncIterator[pb.ModelStatus]:  # noqa: N802
        yield pb.ModelStatus(
            model_name=request.model_name, gateway=pb.Gateway(endpoint=self._gateway, ticket=bytes(32))
        )
        await asyncio.Event().wait()


async def main(agent_port: int, gateway_port: int) -> None:
    server = grpc.aio.server()
    add_NodeAgentServicer_to_server(_Agent(f"127.0.0.1:{gateway_port}"), server)
    server.add_insecure_port(f"127.0.0.1:{agent_port}")
    await server.start()
    listening = await asyncio.get_running_loop().create_server(
        _Answering, "127.0.0.1", gateway_port, backlog=4096
    )
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
