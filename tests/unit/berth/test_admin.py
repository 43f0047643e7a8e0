"""What the agent says to its Triton, with which keys, and what it makes of the answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from berth.contract.endpoint import Endpoint, UnixSocket
from berth.contract.errors import InvalidValue
from berth.contract.ids import ServerName
from berth.triton.admin import GONE, GrpcTritonAdmin, IndexEntry, IndexState, open_admin
from berth.triton.errors import TritonRefused, TritonUnavailable
from berth.triton.keys import TritonKeys
from tests.fakes.grpcs import reached, serving

KEYS = TritonKeys(admin="aaa", inference="iii")
NET = ServerName("net")
Rows = list[tuple[str, str, str]]


class Triton(GRPCInferenceServiceServicer):
    """Notes who calls and how much time each call has; refuses with `code` if it has one."""

    def __init__(self) -> None:
        self.ready = True
        self.code: grpc.StatusCode | None = None
        self.words = "so it is"
        self.rows: Rows = []
        self.seconds: list[float] = []
        self.loaded: dict[str, Any] = {}
        self.unloaded: list[str] = []

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(context)
        return pb.ServerReadyResponse(ready=self.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(context)
        return pb.ServerMetadataResponse(name="triton", version="2.51.0")

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(context)
        rows = [
            pb.RepositoryIndexResponse.ModelIndex(name=name, state=state, reason=reason)
            for name, state, reason in self.rows
        ]
        return pb.RepositoryIndexResponse(models=rows)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(context)
        self.loaded[request.model_name] = json.loads(request.parameters["config"].string_param)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._note(context)
        self.unloaded.append(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def _note(self, context: Any) -> None:
        keys = dict(context.invocation_metadata())
        assert keys["triton-grpc-protocol-berth-admin-key"] == "aaa"
        assert keys["triton-grpc-protocol-berth-inference-key"] == "iii"
        self.seconds.append(context.time_remaining())
        if self.code is not None:
            await context.abort(self.code, self.words)


@asynccontextmanager
async def connected(triton: Triton) -> AsyncIterator[GrpcTritonAdmin]:
    async with (
        serving(lambda server: add_GRPCInferenceServiceServicer_to_server(triton, server)) as port,
        open_admin(Endpoint("127.0.0.1", port), KEYS) as admin,
    ):
        yield admin


async def test_a_server_has_a_version_once_it_is_ready() -> None:
    triton = Triton()
    async with connected(triton) as admin:
        assert await admin.version() == "2.51.0"
        triton.ready = False
        assert await admin.version() is None
    assert all(1 < seconds < 60 for seconds in triton.seconds)


async def test_the_index_tells_of_each_model_what_says_most_about_memory() -> None:
    states = (
        "UNKNOWN",
        "UNAVAILABLE",
        "READY",
        "UNLOADING",
        "LOADING",
    )  # each says more than the ones before
    triton = Triton()
    triton.rows = [("none", "", ""), ("failed", "UNAVAILABLE", "no such layer")]
    for more, one in enumerate(states):
        for other in states[:more]:
            triton.rows += [(f"{one}-{other}", one, "first"), (f"{one}-{other}", other, "")]
            triton.rows += [(f"{other}-{one}", other, ""), (f"{other}-{one}", one, "first")]
    async with connected(triton) as admin:
        index = dict(await admin.index())
    assert index.pop(ServerName("none")) == GONE
    assert index.pop(ServerName("failed")) == IndexEntry(IndexState.UNAVAILABLE, "no such layer")
    assert len(index) == 20
    for name, entry in index.items():
        assert entry == IndexEntry(max(map(IndexState, name.split("-")), key=[*states].index), "first")
    assert 1 < triton.seconds[0] < 60


async def test_a_state_that_a_later_triton_has_is_not_taken_for_gone() -> None:
    triton = Triton()
    triton.rows = [("new", "HIBERNATING", ""), ("ready", "READY", "")]
    async with connected(triton) as admin:
        index = await admin.index()
    assert not index[ServerName("new")].is_gone
    assert index[ServerName("new")].state is not IndexState.READY
    assert index[ServerName("ready")].state is IndexState.READY


def test_only_what_holds_no_memory_is_gone() -> None:
    gone = {state for state in IndexState if IndexEntry(state).is_gone}
    assert gone == {IndexState.UNKNOWN, IndexState.UNAVAILABLE}


async def test_a_load_brings_its_configuration_and_may_take_as_long_as_it_is_given() -> None:
    triton = Triton()
    config = {"name": "net", "parameters": {"big": "x" * 5_000_000}}  # beyond gRPC's usual 4 MiB
    async with connected(triton) as admin:
        await admin.load(NET, config, timeout_seconds=700)
        await admin.unload(NET, timeout_seconds=300)
    assert (triton.loaded, triton.unloaded) == ({"net": config}, ["net"])
    load, unload = triton.seconds
    assert 650 < load < 750
    assert 250 < unload < 350


async def test_a_long_index_is_read_whole() -> None:
    triton = Triton()
    triton.rows = [(f"m{n}", "UNAVAILABLE", "x" * 50_000) for n in range(100)]
    async with connected(triton) as admin:
        assert len(await admin.index()) == 100


@pytest.mark.parametrize(
    ("code", "words", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Server is stopping", TritonUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", TritonUnavailable),
        (grpc.StatusCode.CANCELLED, "gone", TritonUnavailable),
        (grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'x'", TritonRefused),
        (grpc.StatusCode.INTERNAL, "failed to load 'net': no such layer", TritonRefused),
        (grpc.StatusCode.INVALID_ARGUMENT, "unexpected config", TritonRefused),
    ],
)
async def test_what_may_pass_differs_from_what_is_wrong(
    code: grpc.StatusCode, words: str, error: type[Exception]
) -> None:
    triton = Triton()
    triton.code, triton.words = code, words
    async with connected(triton) as admin:
        for call in (
            admin.version(),
            admin.index(),
            admin.load(NET, {}, timeout_seconds=5),
            admin.unload(NET, timeout_seconds=5),
        ):
            with pytest.raises(error) as caught:
                await call
            assert isinstance(caught.value, TritonUnavailable) == (error is TritonUnavailable)
            assert words in str(caught.value)
            assert str(caught.value)


async def test_a_web_proxy_of_the_environment_is_none_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with connected(Triton()) as admin:
        assert await admin.version()


async def test_a_triton_behind_a_socket_needs_no_port(tmp_path: Path) -> None:
    path = tmp_path / "grpc:8001"  # gRPC's own server adds the port to the name of its socket
    server = grpc.aio.server()
    add_GRPCInferenceServiceServicer_to_server(Triton(), server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with open_admin(UnixSocket(str(path)), KEYS) as admin:
            assert await admin.version() == "2.51.0"
    finally:
        await server.stop(None)


async def test_a_triton_that_restarts_is_found_soon() -> None:
    async def call(endpoint: Endpoint, tries: Any) -> None:
        async with open_admin(endpoint, KEYS) as admin:
            await tries(admin.version, TritonUnavailable)

    await reached(lambda server: add_GRPCInferenceServiceServicer_to_server(Triton(), server), call)


def test_keys_are_long_and_never_the_same() -> None:
    keys = [TritonKeys.generate() for _ in range(3)]
    secrets = [secret for one in keys for secret in (one.admin, one.inference)]
    assert len(set(secrets)) == 6
    assert all(32 <= len(secret) <= 256 and secret.isalnum() for secret in secrets)
    assert not any(secret in repr(one) for one in keys for secret in secrets)


def test_each_key_opens_its_own_routes_on_both_front_ends() -> None:
    admin = "model-repository,shared-memory,logging,trace:berth-admin-key=aaa"
    inference = "inference,metadata,statistics,model-config,health:berth-inference-key=iii"
    assert sorted(KEYS.server_flags()) == [
        f"--grpc-restricted-protocol={inference}",
        f"--grpc-restricted-protocol={admin}",
        f"--http-restricted-api={inference}",
        f"--http-restricted-api={admin}",
    ]
    assert KEYS.inference_http_headers == {"berth-inference-key": "iii"}
    assert KEYS.inference_grpc_metadata == {"triton-grpc-protocol-berth-inference-key": "iii"}


def test_keys_are_read_as_they_lie_and_what_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("aaa\n")
    with pytest.raises(InvalidValue, match=f"^{tmp_path}/inference: No such file or directory; berth keys"):
        TritonKeys.read(tmp_path)
    for wrong in ("", "\n", "a b", "a,b"):
        (tmp_path / "inference").write_text(wrong)
        with pytest.raises(InvalidValue, match=f"^{tmp_path}/inference: not a key; berth keys makes one"):
            TritonKeys.read(tmp_path)
    (tmp_path / "inference").write_text(" iii ")
    assert TritonKeys.read(tmp_path) == KEYS


def test_keys_are_written_over_older_ones_for_the_owners_group_only(tmp_path: Path) -> None:
    TritonKeys.generate().write(tmp_path)
    KEYS.write(tmp_path)
    assert (tmp_path / "admin").read_text() == "aaa\n"
    assert (tmp_path / "inference").read_text() == "iii\n"
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "admin": 0o440,
        "inference": 0o440,
    }
