"""What a tenant's pod reaches on a real node of what is not its own: no port of Triton, nothing without a ticket or a token.

The node's bridge enforces no NetworkPolicy, so what holds here holds on any network.
"""

from collections.abc import Awaitable, Callable

import pytest

from localcluster.samples import model_pod
from tests.e2e.support import Json
from tests.fakes.eventually import eventually
from tests.node.support import NodeUser, Served, client_pod, container_status, finished

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Every port of the addresses of Berth's own pods and of the node: which are open, and who of them speaks as Triton does.
# What opened is the last line.
HOSTILE = """
import errno, grpc, http.client, os, select, socket, sys, time, urllib.error, urllib.request
from berth.triton.wire import grpc_service_pb2 as messages, grpc_service_pb2_grpc as services

opened = []

def open_ports(host):
    found, ports = [], iter(range(1, 65536))
    while batch := [port for _, port in zip(range(500), ports)]:
        poll, sockets = select.poll(), {}
        for port in batch:
            probe = socket.socket()
            probe.setblocking(False)
            code = probe.connect_ex((host, port))
            if code == errno.EINPROGRESS:
                sockets[probe.fileno()] = probe, port
                poll.register(probe, select.POLLOUT)
            elif code == 0:
                found.append(port)
            else:
                probe.close()
        deadline = time.monotonic() + 5
        while sockets and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(left * 1000):
                probe, port = sockets.pop(number)
                poll.unregister(probe)
                if not probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found.append(port)
                probe.close()
        for probe, port in sockets.values():
            probe.close()
    return sorted(found)

def asks(host, port):
    for path in ("/v2/health/live", "/v2/models/simple", "/v2/repository/index"):
        try:
            body = b"{}" if "index" in path else None
            with urllib.request.urlopen(f"http://{host}:{port}{path}", body, timeout=5) as answer:
                opened.append(f"{host}:{port}{path}: {answer.status} {answer.read()[:200]}")
        except urllib.error.HTTPError as error:
            if b"restricted" in error.read() or error.code in (200, 403) and path.startswith("/v2/repo"):
                opened.append(f"{host}:{port}{path}: Triton itself says {error.code}")
        except (OSError, http.client.HTTPException) as error:
            print(host, port, path, error)
    stub = services.GRPCInferenceServiceStub(grpc.insecure_channel(f"{host}:{port}"))
    for name, request in (
        ("ServerLive", messages.ServerLiveRequest()),
        ("RepositoryIndex", messages.RepositoryIndexRequest()),
        ("ModelMetadata", messages.ModelMetadataRequest(name="simple")),
    ):
        try:
            getattr(stub, name)(request, timeout=5)
            opened.append(f"{host}:{port} {name}")
        except grpc.RpcError as error:
            print(host, port, name, error.code())
            if error.code() is grpc.StatusCode.UNAUTHENTICATED or "restricted" in (error.details() or ""):
                opened.append(f"{host}:{port} {name}: Triton itself says {error.code()}")

def knock(first):
    with socket.create_connection((os.environ["NODE"], 8472), timeout=5) as gateway:
        try:
            gateway.sendall(first)
            if said := gateway.recv(100):
                opened.append(f"the gateway says {said!r} to {first[:20]!r}")
        except OSError as error:
            print("gateway", error)

server, node = os.environ["SERVER"], os.environ["NODE"]
found = open_ports(server)
if found != [8472, 8473]:
    opened.append(f"ports of Triton's pod: {found}")
for port in found:
    asks(server, port)
for port in open_ports(node):
    asks(node, port)
for port in (8470, 8472):
    asks(node, port)
ticket = b"BERTH" + bytes([1, 1, 0])
for first in (ticket + bytes(32), ticket + os.urandom(32), b"GET /v2/models/simple HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n", bytes(40)):
    knock(first)
for path in ("/run/berth", "/var/lib/berth", "/var/run/secrets/berth"):
    if os.path.exists(path):
        opened.append(path)
sys.exit("opened: " + "; ".join(opened) if opened else None)
"""


async def test_a_pod_without_a_ticket_finds_no_port_of_triton_and_opens_nothing(
    user: NodeUser, simple: Served
) -> None:
    status = (await user.daemon("berth-server"))["status"]
    await user.apply(client_pod("hostile", HOSTILE, SERVER=status["podIP"], NODE=status["hostIP"]))
    pod = await finished(user, "hostile", seconds=180)
    ended = container_status(pod, "client")["state"]["terminated"]
    assert ended["exitCode"] == 0, ended.get("message")
    await simple.infer()


# A model's own pod has its proxy's token: what it gets for another pod's model.
GREEDY = """
import grpc, os, sys
from berth.v1 import node_agent_pb2 as pb, node_agent_pb2_grpc as services

with open("/var/run/secrets/berth/token") as file:
    metadata = (("authorization", f"Bearer {file.read()}"),)
agent = services.NodeAgentStub(grpc.insecure_channel(os.environ["NODE"] + ":8470"))
try:
    status = next(agent.WatchModel(pb.WatchModelRequest(model_name="simple"), metadata=metadata, timeout=20))
    sys.exit(f"opened: {status}")
except grpc.RpcError as error:
    code = error.code()
    if code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND):
        sys.exit(f"{code}: {error.details()}")
"""


async def test_a_models_pod_does_not_get_the_ticket_of_another(
    user: NodeUser, simple: Served, source: str
) -> None:
    pod = model_pod("greedy", source=source, gpu_mem="1Gi", pod_spec={"restartPolicy": "Never"})
    proxy = pod["spec"]["containers"][0]
    (client,) = client_pod("greedy", GREEDY, NODE=(await simple.pod())["status"]["hostIP"])["spec"][
        "containers"
    ]
    pod["spec"]["containers"].append(client | {"volumeMounts": proxy["volumeMounts"]})
    await user.apply(pod)

    async def ended() -> Json:
        found: Json = container_status(await user.pod("greedy"), "client")["state"]["terminated"]
        return found

    state = await eventually_there(ended)
    assert state["exitCode"] == 0, state.get("message")


async def eventually_there(check: Callable[[], Awaitable[Json]]) -> Json:
    async def there() -> Json:
        try:
            return await check()
        except KeyError as error:
            raise AssertionError(f"{error} is not there") from error

    return await eventually(there, seconds=90)


async def test_triton_sees_neither_the_gateways_orders_nor_what_tickets_are_made_of(
    user: NodeUser, simple: Served
) -> None:
    server = await user.daemon("berth-server")
    found = {name: user.files(server, name, "/run/berth") for name in ("triton", "gateway")}
    assert found == {
        "triton": {"keys/inference", "keys/server-flags", "triton/grpc:8001"},
        "gateway": {"keys/inference", "triton/grpc:8001", "gateway/control"},
    }
