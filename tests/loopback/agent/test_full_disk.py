"""A disk that fills up while a model arrives: one clear status, and nothing half-done stays."""

import errno
import hashlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.api import serve
from agent.auth import TrustingAuthenticator
from agent.staging import StagedFiles
from berth.contract.endpoint import Endpoint
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.report import CodeRule
from berth.nodeagent.client import AgentConnection, AgentFull, AgentRefused
from berth.v1 import node_agent_pb2 as pb
from localcluster.addresses import free_port
from tests.fakes.agent_api import LivingPods, api_of
from tests.fakes.agent_node import Node
from tests.fakes.objects import GIB

CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
METADATA = (("berth-pod", "team/p1/p1"),)
MIB = 1024**2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB and 40 inodes."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    options = "size=2m,nr_inodes=40"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


class Pod(AgentConnection):
    """p1, as it says by itself."""

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return METADATA


@asynccontextmanager
async def serving(disk: Path, *, keep_free: float = 0.0) -> AsyncIterator[Pod]:
    node = Node(disk, code=CodeRule.ANY, load_timeout=1, unload_timeout=1)
    api = api_of(
        node,
        TrustingAuthenticator(),
        LivingPods(choice=CHOICE),
        max_model_bytes=GIB,
        keep_free=keep_free,
    )
    listen = Endpoint("127.0.0.1", free_port("127.0.0.1"))
    server = await serve(api, listen)
    try:
        async with grpc.aio.insecure_channel(str(listen)) as channel:
            with grpc.insecure_channel(str(listen)) as threads:
                yield Pod(channel, threads, None)
    finally:
        await server.stop(0)


Files = Sequence[tuple[str, int]]


def model(files: Files, *, before_chunk: Callable[[], None] = lambda: None) -> Iterator[pb.StageRequest]:
    digest = hashlib.sha256()
    yield pb.StageRequest(header=pb.StageHeader(model_name="model-p1"))
    for path, size in files:
        yield pb.StageRequest(file=pb.StageFile(path=path, size=size))
        digest.update(f"{path}\0{size}\0".encode() + b"x" * size)
        before_chunk()
        for at in range(0, size, MIB):
            yield pb.StageRequest(chunk=b"x" * min(MIB, size - at))
    yield pb.StageRequest(commit=pb.StageCommit(digest=digest.hexdigest()))


def broken_off(disk: Path) -> Iterator[pb.StageRequest]:
    """A few bytes, while the disk fills; and no more comes."""
    for request in model([("1/model.py", 10), ("config.pbtxt", 1)], before_chunk=lambda: fill(disk)):
        yield request
        if request.HasField("chunk"):
            return


def fill(disk: Path) -> None:
    """Once the stream's first file is there."""
    tries = 500
    while not list((disk / "staging").glob("*/1/model.py")) and (tries := tries - 1):
        time.sleep(0.01)
    with suppress(OSError), (disk / "other").open("wb") as file:
        while True:
            file.write(b"x" * 4096)


def left_on(disk: Path) -> list[Path]:
    return [*(disk / "staging").iterdir(), *(disk / "models").iterdir()]


@pytest.mark.parametrize(
    ("files", "keep_free"),
    [
        ([("1/model.py", 4 * MIB)], 0.0),
        ([("1/a", MIB), ("1/b", MIB), ("1/c", MIB)], 0.0),
        ([("1/model.py", MIB + MIB // 2)], 0.3),
        ([(f"1/{number:03}", 0) for number in range(40)], 0.0),  # the inodes end first
        ([(f"1/{number:03}", 0) for number in range(30)], 0.4),
    ],
)
async def test_a_full_disk_and_then_a_model_that_fits(disk: Path, files: Files, keep_free: float) -> None:
    async with serving(disk, keep_free=keep_free) as one:
        with pytest.raises(AgentFull, match="No space left on device"):
            await one.stage(model(files))
        assert left_on(disk) == []
        assert (await one.stage(model([("1/model.py", MIB)]))).bytes == MIB
        assert [entry.name for entry in (disk / "models").iterdir()] == [server_name_of("model-p1", "p1")]


async def test_a_disk_that_others_fill_while_a_model_arrives(disk: Path) -> None:
    """What was announced was there, but the node is not ours alone."""
    async with serving(disk) as one:
        with pytest.raises(AgentFull, match="No space left on device"):
            await one.stage(model([("1/model.py", MIB)], before_chunk=lambda: fill(disk)))
        assert left_on(disk) == []
        (disk / "other").unlink()
        assert (await one.stage(model([("1/model.py", MIB)]))).bytes == MIB


async def test_a_stream_that_breaks_off_on_a_full_disk_is_reported_as_broken_off(disk: Path) -> None:
    async with serving(disk) as one:
        with pytest.raises(AgentRefused, match="ended without a commit"):
            await one.stage(broken_off(disk))
        assert left_on(disk) == []


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("where", ["write", "begin_file", "commit"])
async def test_a_disk_that_takes_nothing_is_reported_as_it_is_and_may_do_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    async with serving(tmp_path) as one:
        with monkeypatch.context() as patch:
            patch.setattr(StagedFiles, where, broken)
            with pytest.raises(AgentFull, match=os.strerror(number)):
                await one.stage(model([("1/model.py", 1)]))
        assert left_on(tmp_path) == []
        assert (await one.stage(model([("1/model.py", 1)]))).bytes == 1
