import io
import os
import random
import shutil
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

import loader.archive
import loader.send
from agent.disk_space import DiskSpace
from agent.staging import StagedFiles
from berth.runtime.errors import ConfigError, Failed
from loader.archive import is_archive, unpack
from loader.layout import find_model, place_file
from loader.send import digest_of, list_files
from loader.sources import scheme_of


def tar(path: Path, *members: tuple[str, bytes | None, bytes], mode: str = "w:gz") -> Path:
    """Members as (name, content or None, type)."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, body, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(body or b"")
            info.linkname = "/etc/passwd"
            archive.addfile(info, io.BytesIO(body or b""))
    return path


def zipped(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


FILE, DIRECTORY = tarfile.REGTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize("name", ["m.tar", "m.tar.gz", "m.tgz", "M.TAR.GZ"])
def test_tar_comes_out_as_it_went_in(tmp_path: Path, name: str) -> None:
    mode = "w" if name.endswith(".tar") else "w:gz"
    source = tar(
        tmp_path / name, ("1", None, DIRECTORY), ("1/model.py", b"x", FILE), ("./c", b"y", FILE), mode=mode
    )
    (tmp_path / "out").mkdir()
    unpack(source, tmp_path / "out", source="it")
    assert (tmp_path / "out" / "1" / "model.py").read_bytes() == b"x"
    assert (tmp_path / "out" / "c").read_bytes() == b"y"


def test_zip_comes_out_as_it_went_in(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    unpack(zipped(tmp_path / "m.zip", **{"1/model.py": b"x"}), tmp_path / "out", source="it")
    assert (tmp_path / "out" / "1" / "model.py").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("../evil", b"x", FILE), "'../evil' would leave"),
        (("a/../../evil", b"x", FILE), "would leave"),
        (("/etc/evil", b"x", FILE), "would leave"),
        (("a\\..\\evil", b"x", FILE), "would leave"),
        (("link", None, tarfile.SYMTYPE), "'link' is neither a file nor a directory"),
        (("hard", None, tarfile.LNKTYPE), "neither a file"),
        (("fifo", None, tarfile.FIFOTYPE), "neither a file"),
        (("null", None, tarfile.CHRTYPE), "neither a file"),
    ],
)
def test_members_that_refuse_the_archive(
    tmp_path: Path, member: tuple[str, bytes | None, bytes], message: str
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(Failed, match=message):
        unpack(tar(tmp_path / "m.tar.gz", member), tmp_path / "out", source="it")
    assert not (tmp_path / "evil").exists()


def test_a_link_in_a_zip_refuses_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    (tmp_path / "out").mkdir()
    with pytest.raises(Failed, match="neither a file"):
        unpack(tmp_path / "m.zip", tmp_path / "out", source="it")


def test_a_bomb_is_stopped_by_what_really_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.archive, "RATIO_FLOOR_BYTES", 1024)
    source = zipped(tmp_path / "m.zip", big=b"")
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", b"\0" * 10_000_000)
    (tmp_path / "out").mkdir()
    with pytest.raises(Failed, match="more than 200 times its size"):
        unpack(source, tmp_path / "out", source="it")


@pytest.mark.parametrize("body", [b"", b"nonsense", b"PK\x03\x04broken", b"\x1f\x8b\x08broken"])
def test_what_is_no_archive_says_so(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "out").mkdir()
    for name in ("m.tar.gz", "m.zip"):
        (tmp_path / name).write_bytes(body)
        with pytest.raises(Failed, match="not a readable archive"):
            unpack(tmp_path / name, tmp_path / "out", source="it")


@pytest.mark.parametrize(("name", "mode"), [("m.tar.gz", "w:gz"), ("m.tar", "w:xz"), ("m.zip", "")])
def test_a_file_that_was_damaged_on_its_way_says_so(tmp_path: Path, name: str, mode: str) -> None:
    """Wherever it is: in the middle of a compressed member neither tarfile nor zipfile answers for it."""
    weights = random.Random(name).randbytes(1000) + b"abc" * 3000
    if mode:
        tar(tmp_path / name, ("1/weights", weights, FILE), mode=mode)
    else:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("1/weights", weights)
    whole = (tmp_path / name).read_bytes()
    for position in range(0, len(whole), 11):
        (tmp_path / name).write_bytes(whole[:position] + b"\xff" * 9 + whole[position + 9 :])
        (tmp_path / "out").mkdir()
        with suppress(Failed):  # not every damage can be noticed
            unpack(tmp_path / name, tmp_path / "out", source="it")
        shutil.rmtree(tmp_path / "out")


def test_where_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "a" / "inner" / "1").mkdir(parents=True)
    assert find_model(tmp_path / "a", source="it") == tmp_path / "a" / "inner"
    (tmp_path / "a" / "config.pbtxt").touch()
    assert find_model(tmp_path / "a", source="it") == tmp_path / "a"
    (tmp_path / "b" / "one").mkdir(parents=True)
    (tmp_path / "b" / "two" / "1").mkdir(parents=True)
    with pytest.raises(Failed, match="it holds no Triton model"):
        find_model(tmp_path / "b", source="it")


def test_a_lone_file_goes_where_its_backend_looks() -> None:
    assert place_file("resnet50.onnx", source="it") == "1/model.onnx"
    with pytest.raises(Failed, match=r"\.onnx"):
        place_file("weights.bin", source="it")
    assert is_archive("m.TGZ")
    assert not is_archive("model.onnx")


def test_a_scheme_that_is_not_supported_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'s3' is not supported; use one of file://, http://, https://"):
        scheme_of("s3://bucket/model")
    with pytest.raises(ConfigError):
        scheme_of("model")


def test_both_ends_count_the_same_digest(tmp_path: Path) -> None:
    for name, body in (("1/model.py", b"x" * 3), ("1/z", b""), ("1a", b"y"), ("config.pbtxt", b"c")):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_bytes(body)
    files = list_files(tmp_path / "m")
    assert [file.path for file in files] == ["1/model.py", "1/z", "1a", "config.pbtxt"]
    (tmp_path / "staged").mkdir()
    staged = StagedFiles(
        tmp_path / "staged", max_bytes=100, share=DiskSpace(tmp_path, keep_share=0).reservation()
    )
    for file in files:
        staged.begin_file(file.path, file.size)
        if file.size:
            staged.write(file.location.read_bytes())
    assert staged.commit(digest_of(files)) == digest_of(files)


def test_a_link_that_leads_out_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(Failed, match="leads out"):
        list_files(tmp_path / "m")


def test_a_file_whose_name_is_not_utf_8_is_not_sent(tmp_path: Path) -> None:
    """node D8: the agent's API knows no such names."""
    for where in ("1/mod\udce8le.py", "mod\udce8le/x"):
        model = tmp_path / str(len(where))
        (model / where).parent.mkdir(parents=True)
        (model / where).touch()
        with pytest.raises(Failed, match=r"mod\\udce8le.* has a name that is not UTF-8"):
            list_files(model)


def test_links_to_what_is_inside_are_followed(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (model / "weights").mkdir(parents=True)
    (model / "weights" / "w.bin").write_bytes(b"w")
    (model / "1").symlink_to("weights")
    (model / "2").symlink_to(model / "1")
    (model / "copy.bin").symlink_to("1/w.bin")
    (tmp_path / "again").symlink_to("m")
    for directory in (model, tmp_path / "again"):
        sent = [file.path for file in list_files(directory)]
        assert sent == ["1/w.bin", "2/w.bin", "copy.bin", "weights/w.bin"]


def test_a_mounted_config_map_is_sent_once(tmp_path: Path) -> None:
    """As kubelet mounts it: links through `..data`, beside it the version that it leads to."""
    (tmp_path / "..2026_1").mkdir()
    (tmp_path / "..2026_1" / "config.pbtxt").write_text("")
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "config.pbtxt").symlink_to("..data/config.pbtxt")
    assert [file.path for file in list_files(tmp_path)] == ["config.pbtxt"]


def test_what_cannot_be_sent_is_named_and_not_left_out(tmp_path: Path) -> None:
    def refused(target: str) -> str:
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / "link").symlink_to(target)
        with pytest.raises(Failed) as failed:
            list_files(tmp_path / "m")
        return str(failed.value)

    assert "1/link is a link to a directory that it is in" in refused("..")
    assert "1/link is a link to a directory that it is in" in refused(".")
    assert "link to nothing" in refused("missing")
    assert "leads out" in refused("../..")
    assert "leads out" in refused("/etc")
    shutil.rmtree(tmp_path / "m")
    for one, other in (("a", "b"), ("b", "a")):  # each leads into the other
        (tmp_path / "m" / one).mkdir(parents=True)
        (tmp_path / "m" / one / "link").symlink_to(f"../{other}")
    with pytest.raises(Failed, match="a directory that it is in"):
        list_files(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "pipe")
    with pytest.raises(Failed, match="neither a file nor a directory"):
        list_files(tmp_path / "m")


def config_map(directory: Path, *paths: str) -> None:
    """Files as a kubelet mounts them: the first part of each path is a link through `..data`."""
    for path in paths:
        target = directory / "..2026_1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")
    (directory / "..data").symlink_to("..2026_1")
    for name in {path.partition("/")[0] for path in paths}:
        (directory / name).symlink_to(f"..data/{name}")


def test_a_mounted_config_map_may_hold_version_directories_or_a_whole_model(tmp_path: Path) -> None:
    config_map(tmp_path / "a", "1/model.py", "config.pbtxt")
    found = find_model(tmp_path / "a", source="a")
    assert [file.path for file in list_files(found)] == ["1/model.py", "config.pbtxt"]
    config_map(tmp_path / "b", "net/1/model.py", "net/config.pbtxt")
    found = find_model(tmp_path / "b", source="b")
    assert [file.path for file in list_files(found)] == ["1/model.py", "config.pbtxt"]
    (tmp_path / "c").mkdir()
    config_map(tmp_path / "c" / "1", "model.py")  # mounted where a version belongs
    assert [file.path for file in list_files(tmp_path / "c")] == ["1/model.py"]


def test_what_only_looks_like_a_kubelets_is_sent(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "x").write_bytes(b"x")
    assert [file.path for file in list_files(tmp_path)] == ["..data/x"]


def test_a_directory_without_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(Failed, match="holds no file"):
        list_files(tmp_path)


def test_links_that_multiply_files_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.send, "MAX_FILES", 100)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "x").write_bytes(b"x")
    for level in range(1, 20):
        (tmp_path / str(level)).mkdir()
        for name in "ab":
            (tmp_path / str(level) / name).symlink_to(f"../{level - 1}")
    with pytest.raises(Failed, match="more than 100 files"):
        list_files(tmp_path)
