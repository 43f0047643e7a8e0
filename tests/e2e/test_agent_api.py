"""The agent's API: which token allows what, and what no message may cause."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from berth.kube.errors import Conflict
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentStub
from localcluster.samples import model_pod
from tests.e2e.support import User
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

AUDIENCE = "berth-agent"
MINUTES = 600


async def token_of(
    user: User, pod: dict[str, Any] | None, *, audience: str = AUDIENCE, seconds: int = MINUTES
) -> str:
    """A real token of the default ServiceAccount, bound to `pod` where there is one."""
    spec: dict[str, Any] = {"audiences": [audience], "expirationSeconds": seconds}
    if pod is not None:
        meta = pod["metadata"]
        spec["boundObjectRef"] = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
    answer = await user.client.create(
        "/api/v1/namespaces/default/serviceaccounts/default/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
    )
    return str(answer["status"]["token"])


@asynccontextmanager
async def agent_of(user: User, node: str) -> AsyncIterator[NodeAgentStub]:
    channel = grpc.aio.insecure_channel(f"{user.cluster.nodes[node].address}:8470")
    async with channel:
        yield NodeAgentStub(channel)  # type: ignore[no-untyped-call]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def expired(token: str, key: Path) -> str:
    """The same token as of an hour ago, signed with the cluster's own key: only its time is over."""
    header, payload, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    for claim in ("iat", "nbf", "exp"):
        claims[claim] -= 3600
    signed = f"{header}.{_base64(json.dumps(claims).encode())}"
    private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    assert isinstance(private, rsa.RSAPrivateKey)
    signature = private.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{signed}.{_base64(signature)}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status of a call that must fail."""
    try:
        async with asyncio.timeout(30):
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    pytest.fail("the agent allowed it")


def staged(name: str, *, path: str = "1/model.py", body: bytes = b"x", commit: bool = True) -> Any:
    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name=name))
        yield pb.StageRequest(file=pb.StageFile(path=path, size=len(body)))
        yield pb.StageRequest(chunk=body)
        if commit:
            yield pb.StageRequest(commit=pb.StageCommit(digest="0" * 64))

    return parts()


@pytest_asyncio.fixture(loop_scope="session")
async def mine(user: User, source: str) -> dict[str, Any]:
    """A served pod on gpu-1."""
    on = {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}}
    await user.apply(model_pod("mine", source=source, gpu_mem="1Gi", pod_spec=on))
    (pod,) = await user.ready("mine")
    return pod


async def test_no_token_and_wrong_tokens_open_nothing(user: User, mine: dict[str, Any]) -> None:
    tokens = {
        "none": (),
        "nonsense": bearer("nonsense"),
        "other audience": bearer(await token_of(user, mine, audience="https://kubernetes.default.svc")),
        "no pod": bearer(await token_of(user, None)),
        "another scheme": (("authorization", "Basic dXNlcjpwYXNz"),),
        "expired": bearer(expired(await token_of(user, mine), user.cluster.signing_key)),
    }
    async with agent_of(user, "gpu-1") as agent:
        for what, metadata in tokens.items():
            for call in (
                agent.Unload(pb.UnloadRequest(model_name="mine"), metadata=metadata),
                agent.ListModels(pb.ListModelsRequest(), metadata=metadata),
                agent.Stage(staged("mine"), metadata=metadata),
                agent.Load(pb.LoadRequest(model_name="mine"), metadata=metadata).read(),
                agent.WatchModel(pb.WatchModelRequest(model_name="mine"), metadata=metadata).read(),
            ):
                code, _ = await refused(call)
                assert code is grpc.StatusCode.UNAUTHENTICATED, what


async def test_another_pods_token_does_not_open_this_pods_model(
    user: User, mine: dict[str, Any], source: str
) -> None:
    on = {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}}
    await user.apply(model_pod("neighbour", source=source, gpu_mem="1Gi", pod_spec=on))
    (neighbour,) = await user.ready("neighbour")
    metadata = bearer(await token_of(user, neighbour))
    async with agent_of(user, "gpu-1") as agent:
        for call in (
            agent.Unload(pb.UnloadRequest(model_name="mine"), metadata=metadata),
            agent.Stage(staged("mine"), metadata=metadata),
            agent.Load(pb.LoadRequest(model_name="mine"), metadata=metadata).read(),
            agent.WatchModel(pb.WatchModelRequest(model_name="mine"), metadata=metadata).read(),
        ):
            code, _ = await refused(call)
            assert code is grpc.StatusCode.PERMISSION_DENIED
        listed = await agent.ListModels(pb.ListModelsRequest(), metadata=metadata)
    assert [model.model_name for model in listed.models] == ["neighbour"]
    assert (await user.models_on("gpu-1"))["mine"] == "ready"


@pytest.mark.nightly
async def test_a_pod_of_another_node_opens_nothing_here(user: User, mine: dict[str, Any]) -> None:
    metadata = bearer(await token_of(user, mine))
    async with agent_of(user, "gpu-2") as agent:
        code, details = await refused(agent.Stage(staged("mine"), metadata=metadata))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "node" in details


@pytest.mark.nightly
async def test_a_token_dies_with_its_pod(user: User, mine: dict[str, Any]) -> None:
    metadata = bearer(await token_of(user, mine))
    await user.client.delete("/api/v1/namespaces/default/pods/mine", grace_seconds=0)
    deadline = time.monotonic() + 60
    async with agent_of(user, "gpu-1") as agent:
        while time.monotonic() < deadline:
            code, _ = await refused(agent.Stage(staged("mine"), metadata=metadata))
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return
            assert code is grpc.StatusCode.PERMISSION_DENIED  # the pod is gone, the token not yet forgotten
            await asyncio.sleep(1)
    pytest.fail("the token outlived its pod by a minute")


NO_NAMES = ("..", "../x", "a/b", "/etc", "a\x00b", "a\nb", "\x1b[2J", "x" * 300, "", "mine/../mine")
NO_PATHS = ("..", "../x", "/etc/passwd", "a/../../b", "a//b", "a\x00", "1/\n", ".berth.json", "x" * 5000)


@pytest.mark.nightly
async def test_names_that_no_model_and_paths_that_no_file_may_have(user: User, mine: dict[str, Any]) -> None:
    metadata = bearer(await token_of(user, mine))
    async with agent_of(user, "gpu-1") as agent:
        for name in NO_NAMES:
            for call in (
                agent.Stage(staged(name), metadata=metadata),
                agent.Load(pb.LoadRequest(model_name=name), metadata=metadata).read(),
                agent.Unload(pb.UnloadRequest(model_name=name), metadata=metadata),
            ):
                code, _ = await refused(call)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, name
        for path in NO_PATHS:
            code, _ = await refused(agent.Stage(staged("mine", path=path), metadata=metadata))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, path
    assert user.repository("gpu-1") == ["mine"]


@pytest.mark.nightly
async def test_a_stage_that_breaks_half_way_or_lies_leaves_nothing(user: User, mine: dict[str, Any]) -> None:
    metadata = bearer(await token_of(user, mine))
    async with agent_of(user, "gpu-1") as agent:
        code, _ = await refused(agent.Stage(staged("mine", commit=False), metadata=metadata))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, _ = await refused(agent.Stage(staged("mine"), metadata=metadata))
        assert code is grpc.StatusCode.DATA_LOSS
        assert user.repository("gpu-1") == ["mine"]

        async def endless() -> AsyncIterator[pb.StageRequest]:
            yield pb.StageRequest(header=pb.StageHeader(model_name="mine"))
            yield pb.StageRequest(file=pb.StageFile(path="1/weights", size=10**6))
            yield pb.StageRequest(chunk=b"x" * 1000)
            await asyncio.sleep(3600)

        call = agent.Stage(endless(), metadata=metadata)

        async def has_begun() -> None:
            assert user.repository("gpu-1") != ["mine"]

        await eventually(has_begun, seconds=10, what="files to arrive")
        call.cancel()
    deadline = time.monotonic() + 10
    while user.repository("gpu-1") != ["mine"] and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert user.repository("gpu-1") == ["mine"]
    assert (await user.models_on("gpu-1"))["mine"] == "ready"


@pytest.mark.nightly
async def test_unload_of_a_pod_that_goes_on_keeps_the_model(user: User, mine: dict[str, Any]) -> None:
    metadata = bearer(await token_of(user, mine))
    async with agent_of(user, "gpu-1") as agent:
        answer = await agent.Unload(pb.UnloadRequest(model_name="mine"), metadata=metadata)
    assert answer.outcome == pb.UnloadResponse.OUTCOME_KEPT
    assert (await user.models_on("gpu-1"))["mine"] == "ready"


@pytest.mark.nightly
async def test_a_token_for_an_ended_pod_is_not_given(user: User, mine: dict[str, Any]) -> None:
    other = {"metadata": {**mine["metadata"], "uid": "00000000-0000-0000-0000-000000000000"}}
    with pytest.raises(Conflict):
        await token_of(user, other)
