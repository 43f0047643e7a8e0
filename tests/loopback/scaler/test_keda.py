"""The external scaler, asked by KEDA's own client."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey
from localcluster.addresses import free_port
from localcluster.credentials import make_client_certificate, make_serving_certificate
from scaler.core.models_view import Averages
from scaler.export import keda
from scaler.export.keda import KedaScaler, serve
from scaler.export.tls import GrpcTls, TlsFiles
from tests.fakes.models_view import FakeModels
from tests.oracles.keda import keda_client

HOST = "127.0.0.1"
SECONDS = 20.0
EMPTY: Mapping[str, str] = {}
Json = dict[str, Any]


class Client:
    """KEDA's side of a connection."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._next, self._answers = process, 0, dict[int, asyncio.Queue[Json]]()

    async def ask(
        self, op: str, *, of: str = "a/m", trigger: Mapping[str, str] = EMPTY, metric: str = ""
    ) -> Json:
        return await self.hear(self.begin(op, of=of, trigger=trigger, metric=metric))

    def begin(self, op: str, *, of: str = "a/m", trigger: Mapping[str, str] = EMPTY, metric: str = "") -> int:
        """`trigger`: its metadata; `metric`: by the name that was told."""
        self._next += 1
        self._answers[self._next] = asyncio.Queue()
        namespace, _, name = of.partition("/")
        self._write(
            id=self._next, op=op, namespace=namespace, name=name, metadata=dict(trigger), metric=metric
        )
        return self._next

    def close(self, stream: int) -> None:
        self._write(id=stream, op="close")

    async def hear(self, number: int) -> Json:
        async with asyncio.timeout(SECONDS):
            told = await self._answers[number].get()
        del told["id"]
        return told

    def has_heard(self, number: int) -> bool:
        return not self._answers[number].empty()

    async def read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            self._answers[told["id"]].put_nowait(told)

    def _write(self, **line: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")


@asynccontextmanager
async def client_of(port: int, *flags: str) -> AsyncIterator[Client]:
    program = await asyncio.to_thread(keda_client)
    process = await asyncio.create_subprocess_exec(
        program,
        f"-address={HOST}:{port}",
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    client = Client(process)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        process.kill()
        await process.wait()
        await reading


@asynccontextmanager
async def served(models: FakeModels, *, port: int, tls: GrpcTls | None = None) -> AsyncIterator[KedaScaler]:
    scaler = KedaScaler(models)
    server = await serve(scaler, Endpoint(HOST, port), tls)
    try:
        yield scaler
    finally:
        scaler.end()
        await server.stop(1.0)


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


async def test_a_round_as_keda_makes_it(models: FakeModels) -> None:
    """The metric's target for the HPA, then its value and whether anybody wants the model."""
    model = models.add("a/m", concurrency=Averages(3.25, 0.0), desired=5, capacity_limited=2)
    async with served(models, port=(port := free_port(HOST))), client_of(port) as client:
        assert await client.ask("spec") == {"metrics": {"berth-concurrency": 2.0}}
        assert await client.ask("spec", trigger={"target": "0.5"}) == {"metrics": {"berth-concurrency": 0.5}}
        assert await client.ask("metrics", metric="berth-concurrency") == {
            "metrics": {"berth-concurrency": 3.25}
        }
        assert await client.ask("active") == {"active": True}
        assert await client.ask("spec", trigger={"metric": "desired"}) == {"metrics": {"berth-desired": 1.0}}
        assert await client.ask("metrics", trigger={"metric": "desired"}) == {
            "metrics": {"berth-desired": 3.0}
        }
        models.change(model, concurrency=Averages(0.0, 0.0))
        assert await client.ask("metrics", metric="berth-concurrency") == {
            "metrics": {"berth-concurrency": 0.0}
        }
        assert await client.ask("active") == {"active": False}


async def test_refusals_name_what_would_be_right(models: FakeModels) -> None:
    models.add("a/m")
    models.add("b/other")
    async with served(models, port=(port := free_port(HOST))), client_of(port) as client:
        for op in ("spec", "metrics", "active", "stream", "specs"):
            unknown = await client.ask(op, of="a/unknown")
            assert unknown["code"] == "NotFound", op
            assert "a/unknown" in unknown["message"]
            # Another namespace's model, however it is asked for.
            assert (await client.ask(op, of="a/other"))["code"] == "NotFound", op
            assert (await client.ask(op, trigger={"model": "b/other"}))["code"] == "InvalidArgument", op
            assert (await client.ask(op, trigger={"target": "none"}))["code"] == "InvalidArgument", op
        assert (await client.ask("metrics", metric="berth-rps"))["code"] == "InvalidArgument"
        targetless = await client.ask("spec", trigger={"metric": "rps"})
        assert (targetless["code"], targetless["message"][:6]) == ("InvalidArgument", "target")
        models.leads = False
        for op in ("spec", "metrics", "active", "stream", "specs"):
            assert (await client.ask(op))["code"] == "Unavailable", op


async def test_what_is_not_known_is_no_zero(models: FakeModels) -> None:
    """By an error KEDA leaves the replicas as they are; by a 0 it would end them."""
    models.add("a/m", concurrency=Averages(), requests_per_second=Averages(), waiting=Averages())
    async with served(models, port=(port := free_port(HOST))), client_of(port) as client:
        assert (await client.ask("metrics"))["code"] == "Unavailable"
        assert (await client.ask("active"))["code"] == "Unavailable"


async def test_a_stream_says_true_whenever_a_model_begins_to_be_wanted(models: FakeModels) -> None:
    model = models.add("a/m", ready=0)
    async with served(models, port=(port := free_port(HOST))) as scaler, client_of(port) as client:
        stream = client.begin("stream")
        for _ in range(3):
            assert await client.ask("active") == {"active": False}
            assert not client.has_heard(stream), "false would end the replicas of an older KEDA at once"
            models.change(model, buffered=1)
            scaler.look([model])
            assert await client.hear(stream) == {"active": True}
            models.change(model, buffered=2)
            scaler.look([model, ModelKey("b", "nobody-watches")])
            assert await client.ask("active") == {"active": True}
            assert not client.has_heard(stream), "it has been told"
            models.change(model, buffered=0)
            scaler.look([model])
        already = models.add("a/busy", buffered=1)
        assert await client.hear(client.begin("stream", of=str(already))) == {"active": True}


async def test_a_stream_outlives_a_while_in_which_nothing_is_known(models: FakeModels) -> None:
    model = models.add("a/m", concurrency=Averages())
    async with served(models, port=(port := free_port(HOST))) as scaler, client_of(port) as client:
        stream = client.begin("stream")
        assert (await client.ask("active"))["code"] == "Unavailable"
        models.change(model, concurrency=Averages(1.0, 1.0))
        scaler.look([model])
        assert await client.hear(stream) == {"active": True}
        del models.views[model]
        scaler.look([model])
        assert (await client.hear(stream))["code"] == "NotFound"


async def test_another_target_is_reported_without_being_asked(models: FakeModels) -> None:
    model = models.add("a/m", target="2")
    async with served(models, port=(port := free_port(HOST))) as scaler, client_of(port) as client:
        stream = client.begin("specs")
        assert await client.hear(stream) == {"metrics": {"berth-concurrency": 2.0}}
        scaler.look([model])
        assert await client.ask("spec") == {"metrics": {"berth-concurrency": 2.0}}
        assert not client.has_heard(stream), "it is the same"
        models.add("a/m", target="3")
        scaler.look([model])
        assert await client.hear(stream) == {"metrics": {"berth-concurrency": 3.0}}


async def test_keda_finds_the_next_scaler_without_being_told(models: FakeModels) -> None:
    """The stream ends in peace, which KEDA answers by coming back at once; the same connection serves again."""
    models.add("a/m", buffered=1)
    port = free_port(HOST)
    async with client_of(port) as client:
        async with served(models, port=port):
            stream = client.begin("stream")
            assert await client.hear(stream) == {"active": True}
        assert await client.hear(stream) == {"code": "OK"}
        assert (await client.ask("active"))["code"] == "Unavailable"
        async with served(models, port=port):
            await eventually_active(client)


async def eventually_active(client: Client) -> None:
    async with asyncio.timeout(SECONDS):
        while await client.ask("active") != {"active": True}:
            await asyncio.sleep(0.1)


async def test_streams_are_bounded_of_a_model_and_in_all(
    models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keda, "_STREAMS_OF_A_MODEL", 2)
    monkeypatch.setattr(keda, "_STREAMS", 3)
    for name in ("a/m", "a/n", "a/o"):
        models.add(name, buffered=1)
    async with served(models, port=(port := free_port(HOST))) as scaler, client_of(port) as client:
        first, second = [client.begin("stream") for _ in range(2)]
        assert await heard_all(client, [first, second]) == [{"active": True}] * 2
        assert (await client.ask("stream"))["code"] == "ResourceExhausted"
        other = client.begin("stream", of="a/n")
        assert await client.hear(other) == {"active": True}
        assert (await client.ask("stream", of="a/o"))["code"] == "ResourceExhausted"
        # Who leaves makes room.
        client.close(first)
        assert (await client.hear(first))["code"] == "Canceled"
        async with asyncio.timeout(SECONDS):
            while "active" not in await client.ask("stream", of="a/o"):
                await asyncio.sleep(0.05)
        # And calls that are none are served beside them.
        assert await client.ask("active", of="a/o") == {"active": True}
        scaler.end()
        assert await client.hear(second) == {"code": "OK"}


async def test_a_call_and_the_connections_are_bounded(
    models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keda, "_CONNECTIONS", 1)
    models.add("a/m", buffered=1)
    async with served(models, port=(port := free_port(HOST))), client_of(port) as client:
        assert await client.ask("active", trigger={"said": "x" * 60_000}) == {"active": True}
        told = await client.ask("active", trigger={"said": "x" * 70_000})
        assert told["code"] == "ResourceExhausted"
        async with client_of(port) as second:
            assert (await second.ask("active"))["code"] == "Unavailable"
        assert await client.ask("active") == {"active": True}


async def heard_all(client: Client, streams: Iterable[int]) -> list[Json]:
    return [await client.hear(stream) for stream in streams]


async def test_who_has_no_certificate_is_not_served_where_one_is_wanted(
    models: FakeModels, tmp_path: Path
) -> None:
    models.add("a/m", buffered=1)
    server = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "client.crt")
    make_serving_certificate(server.cert, server.key, hosts=[HOST])
    for name in ("client", "stranger"):
        make_client_certificate(tmp_path / f"{name}.crt", tmp_path / f"{name}.key", user="keda", group="g")
    ca = f"-ca={server.cert}"

    def shown(name: str) -> tuple[str, str, str]:
        return ca, f"-cert={tmp_path / name}.crt", f"-key={tmp_path / name}.key"

    async with served(models, port=(port := free_port(HOST)), tls=GrpcTls(server)):
        async with client_of(port, *shown("client")) as client:
            assert await client.ask("active") == {"active": True}
        for flags in (shown("stranger"), (ca,), ()):
            async with client_of(port, *flags) as client:
                assert (await client.ask("active"))["code"] == "Unavailable", flags
        # A renewed certificate, and another authority of the clients, need no restart.
        make_serving_certificate(server.cert, server.key, hosts=[HOST])
        (tmp_path / "client.crt").write_bytes((tmp_path / "stranger.crt").read_bytes())
        async with client_of(port, *shown("stranger")) as client:
            assert await client.ask("active") == {"active": True}
