"""From what --uri says to a directory with a model in it."""

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest
from aiohttp import web

from berth.runtime.errors import ConfigError, Failed
from loader.download import Bounds
from loader.sources import Request, fetched, scheme_of
from tests.fakes.web import serving

WEIGHTS = b"weights"
BOUNDS = Bounds(idle_seconds=5, total_seconds=60, most_bytes=2**30)
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


def packed(name: str = "1/model.py") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(WEIGHTS)
        archive.addfile(info, io.BytesIO(WEIGHTS))
    return data.getvalue()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


async def files_of(uri: str, work: Path, sha256: str | None = None) -> dict[str, bytes]:
    """The files of the model that a URI leads to. Nothing of it may stay in the working directory."""
    async with fetched(Request(uri, sha256, BOUNDS), work) as directory:
        found = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }
    assert list(work.iterdir()) == []
    return found


async def refusal(uri: str, work: Path, sha256: str | None = None) -> str:
    with pytest.raises((ConfigError, Failed)) as caught:
        await files_of(uri, work, sha256)
    assert list(work.iterdir()) == []
    return f"{type(caught.value).__name__}: {caught.value}"


async def test_a_directory_is_taken_where_it_is_and_stays(tmp_path: Path, work: Path) -> None:
    (tmp_path / "a model" / "1").mkdir(parents=True)
    (tmp_path / "a model" / "1" / "model.py").write_bytes(WEIGHTS)
    for uri in (f"file://{tmp_path}/a%20model", f"file://localhost{tmp_path}/a model"):
        assert await files_of(uri, work) == {"1/model.py": WEIGHTS}
    async with fetched(Request(f"file://{tmp_path}/a%20model", None, BOUNDS), work) as directory:
        assert directory == tmp_path / "a model"


async def test_an_archive_is_unpacked_and_a_lone_file_put_in_its_place(tmp_path: Path, work: Path) -> None:
    (tmp_path / "m.tgz").write_bytes(packed("inner/1/model.py"))
    (tmp_path / "m.onnx").write_bytes(WEIGHTS)
    assert await files_of(f"file://{tmp_path}/m.tgz", work) == {"1/model.py": WEIGHTS}
    assert await files_of(f"file://{tmp_path}/m.onnx", work) == {"1/model.onnx": WEIGHTS}
    assert (tmp_path / "m.onnx").exists()


async def test_an_empty_archive_holds_no_model(tmp_path: Path, work: Path) -> None:
    with tarfile.open(tmp_path / "m.tar", "w"):
        pass
    assert "holds no Triton model" in await refusal(f"file://{tmp_path}/m.tar", work)


async def test_a_file_must_be_the_one_that_was_meant(tmp_path: Path, work: Path) -> None:
    (tmp_path / "m.pt").write_bytes(WEIGHTS)
    uri = f"file://{tmp_path}/m.pt"
    assert await files_of(uri, work, DIGEST) == {"1/model.pt": WEIGHTS}
    assert f"SHA-256 is {DIGEST}, but --sha256 says" in await refusal(uri, work, "0" * 64)


async def test_what_is_not_there_is_named(tmp_path: Path, work: Path) -> None:
    assert "absent: no such file or directory" in await refusal(f"file://{tmp_path}/absent", work)
    assert "three slashes" in await refusal("file://models/resnet", work)
    assert (await refusal(f"file://{work}", work)).startswith("Failed: file:")


async def test_a_working_directory_that_cannot_be_used_names_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--work-dir: .*absent: No such file"):
        async with fetched(Request(f"file://{tmp_path}", None, BOUNDS), tmp_path / "absent"):
            pass


async def test_what_lies_in_the_working_directory_tells_whose_it_is(tmp_path: Path, work: Path) -> None:
    (tmp_path / "m.tgz").write_bytes(packed())
    async with fetched(Request(f"file://{tmp_path}/m.tgz", None, BOUNDS), work) as directory:
        (mine,) = work.iterdir()
        assert mine.name.startswith("berth-loader-")
        assert directory.is_relative_to(mine)
        shutil.rmtree(mine)  # whoever cleans up before us does no harm


class Store:
    """Serves one body under every path."""

    def __init__(self, body: bytes) -> None:
        self.body, self.asked = body, list[str]()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.Response(body=self.body)


async def test_over_http_the_name_in_the_url_says_what_it_is(work: Path) -> None:
    store = Store(WEIGHTS)
    async with serving(store.handle) as url:
        assert await files_of(f"{url}/models/net%2Ev1.onnx?key=a/b", work) == {"1/model.onnx": WEIGHTS}
        store.body = packed()
        assert await files_of(f"{url}/m.TAR.GZ", work) == {"1/model.py": WEIGHTS}
        assert store.asked == ["/models/net.v1.onnx", "/m.TAR.GZ"]


async def test_an_archive_is_gone_once_it_is_unpacked(work: Path) -> None:
    """Beside what is in it, it would need the room twice."""
    async with (
        serving(Store(packed()).handle) as url,
        fetched(Request(f"{url}/m.tgz", None, BOUNDS), work) as directory,
    ):
        assert [path.name for path in work.rglob("*") if path.is_file()] == ["model.py"]
        assert directory.is_dir()


async def test_what_no_backend_would_find_is_not_even_requested(work: Path) -> None:
    store = Store(WEIGHTS)
    async with serving(store.handle) as url:
        for path in ("/weights.bin", "/", ""):
            assert "a model file (.onnx, .plan, .pt, .py) is expected" in await refusal(url + path, work)
    assert store.asked == []


async def test_a_download_must_be_the_one_that_was_meant(work: Path) -> None:
    async with serving(Store(WEIGHTS).handle) as url:
        assert await files_of(f"{url}/m.plan", work, DIGEST) == {"1/model.plan": WEIGHTS}
        assert "SHA-256 is" in await refusal(f"{url}/m.plan", work, "0" * 64)


def test_a_scheme_that_is_not_supported_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'s3' is not supported; use one of file://, http://, https://"):
        scheme_of("s3://bucket/model")
    with pytest.raises(ConfigError):
        scheme_of("model")
