"""What a tenant's pod reaches on a real node of what is not its own: nothing that opens without a key or a token.

The node's bridge enforces no NetworkPolicy, so what holds here holds on any network.
"""

import pytest

from tests.node.support import NodeUser, Served, client_pod, container_status, finished

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Every address and port at which Berth's own pods can be reached; what opened is the last line.
HOSTILE = """
import grpc, os, sys, urllib.error, urllib.request
from berth.triton.wire import grpc_service_pb2 as messages, grpc_service_pb2_grpc as services

opened = []

def post(url, path):
    try:
        with urllib.request.urlopen(f"http://{url}{path}", b"{}", timeout=10) as answer:
            opened.append(f"{url}{path}: {answer.status} {answer.read()[:200]}")
    except OSError as error:
        print(url, path, error)

def call(address, name, request):
    try:
        getattr(services.GRPCInferenceServiceStub(grpc.insecure_channel(address)), name)(request, timeout=10)
        opened.append(f"{address} {name}")
    except grpc.RpcError as error:
        print(address, name, error.code())

for host in (os.environ["TRITON"], os.environ["NODE"]):
    for path in ("/v2/repository/index", "/v2/repository/models/simple/unload", "/v2/models/simple/infer"):
        post(f"{host}:8000", path)
    post(f"{host}:8002", "/metrics")
    call(f"{host}:8001", "RepositoryIndex", messages.RepositoryIndexRequest())
    call(f"{host}:8001", "RepositoryModelUnload", messages.RepositoryModelUnloadRequest(model_name="simple"))
    call(f"{host}:8001", "ModelMetadata", messages.ModelMetadataRequest(name="simple"))
for path in ("/run/berth/keys", "/var/lib/berth", "/var/run/secrets/berth"):
    if os.path.exists(path):
        opened.append(path)
sys.exit("opened: " + "; ".join(opened) if opened else None)
"""


async def test_a_pod_without_keys_opens_nothing_of_triton(user: NodeUser, simple: Served) -> None:
    status = (await user.daemon("berth-server"))["status"]
    await user.apply(client_pod("hostile", HOSTILE, TRITON=status["podIP"], NODE=status["hostIP"]))
    ended = container_status(await finished(user, "hostile"), "client")["state"]["terminated"]
    assert ended["exitCode"] == 0, ended.get("message")
    await simple.infer()
