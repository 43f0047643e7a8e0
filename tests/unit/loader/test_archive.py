import io
import random
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

import loader.archive
import loader.send
from berth.runtime.errors import Failed
from loader.archive import MAX_RATIO, RATIO_FLOOR_BYTES, is_archive, unpack


def tar(path: Path, *members: tuple[str, bytes | None, bytes], mode: str = "w:gz") -> Path:
    """Members as (name, content or None, type)."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, body, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(body or b"")
            info.linkname = "/etc/passwd"
            archive.addfile(info, io.BytesIO(body or b""))
    return path


FILE, DIRECTORY = tarfile.REGTYPE, tarfile.DIRTYPE


def tar_of(path: Path, files: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    return tar(path, *((name, body, FILE) for name, body in files), mode=mode)


def unpacked(archive: Path) -> dict[str, bytes]:
    target = archive.with_name(archive.name + ".out")
    target.mkdir()
    unpack(archive, target, source="it")
    return {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["m.tar", "m.tar.gz", "m.tgz", "M.TAR.GZ"])
def test_tar_comes_out_as_it_went_in(tmp_path: Path, name: str) -> None:
    mode = "w" if name.endswith(".tar") else "w:gz"
    source = tar(
        tmp_path / name, ("1", None, DIRECTORY), ("1/model.py", b"x", FILE), ("./c", b"y", FILE), mode=mode
    )
    assert unpacked(source) == {"1/model.py": b"x", "c": b"y"}


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
    with pytest.raises(Failed, match=message):
        unpacked(tar(tmp_path / "m.tar.gz", member))
    assert not (tmp_path / "evil").exists()


def test_a_link_in_a_zip_refuses_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(Failed, match="neither a file"):
        unpacked(tmp_path / "m.zip")


@pytest.mark.parametrize("body", [b"", b"nonsense", b"PK\x03\x04broken", b"\x1f\x8b\x08broken"])
def test_what_is_no_archive_says_so(tmp_path: Path, body: bytes) -> None:
    for name in ("m.tar.gz", "m.zip"):
        (tmp_path / name).write_bytes(body)
        with pytest.raises(Failed, match="not a readable archive"):
            unpacked(tmp_path / name)


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
        with suppress(Failed):  # not every damage can be noticed
            unpacked(tmp_path / name)
        shutil.rmtree(tmp_path / f"{name}.out")


GIB = 1024**3


@pytest.fixture
def no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.archive, "RATIO_FLOOR_BYTES", 0)


def test_weights_hardly_shrink_but_a_small_archive_may_hold_much() -> None:
    assert 10 <= MAX_RATIO <= 1000
    assert GIB // 4 <= RATIO_FLOOR_BYTES <= 10 * GIB


@pytest.mark.parametrize("over", [0, 1])
def test_the_bound_is_for_all_members_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    source = tar_of(tmp_path / "m.tar", [("a", bytes(6000)), ("b", bytes(4240))])
    monkeypatch.setattr(loader.archive, "RATIO_FLOOR_BYTES", 10240 - over)
    monkeypatch.setattr(loader.archive, "MAX_RATIO", 0)
    if over:
        with pytest.raises(Failed, match="it: unpacks to more than 0 times its size"):
            unpacked(source)
    else:
        assert sum(map(len, unpacked(source).values())) == 10240


@pytest.mark.usefixtures("no_floor")
def test_what_is_within_the_ratio_comes_out_whatever_the_floor(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(100_000)
    assert unpacked(tar_of(tmp_path / "m.tar.gz", [("a", body)], "w:gz")) == {"a": body}
    (tmp_path / "bomb").mkdir()
    with pytest.raises(Failed, match="more than 200 times"):
        unpacked(tar_of(tmp_path / "bomb" / "m.tar.gz", [("a", bytes(10_000_000))], "w:gz"))
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(10_000_000))
    with pytest.raises(Failed, match="more than 200 times"):
        unpacked(tmp_path / "bomb.zip")


def test_so_many_files_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1000 <= loader.archive.MAX_FILES <= 1_000_000
    monkeypatch.setattr(loader.archive, "MAX_FILES", 2)
    assert len(unpacked(tar_of(tmp_path / "two.tar", [("a", b""), ("b", b"")]))) == 2
    with pytest.raises(Failed, match="it: more than 2 files"):
        unpacked(tar_of(tmp_path / "three.tar", [("a", b""), ("b", b""), ("c", b"")]))


def test_no_member_writes_over_another(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"it: not a readable archive: .*File exists"):
        unpacked(tar_of(tmp_path / "m.tar", [("a", b"x"), ("a", b"y")]))


def test_a_zip_as_unix_and_as_windows_write_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.ZIP", "w") as archive:
        archive.mkdir("1")
        archive.mkdir("empty")
        plain, dos = zipfile.ZipInfo("1/model.py"), zipfile.ZipInfo("config.pbtxt")
        plain.external_attr, dos.external_attr = 0o100644 << 16, 0x20
        archive.writestr(plain, "x")
        archive.writestr(dos, "y")
    assert unpacked(tmp_path / "m.ZIP") == {"1/model.py": b"x", "config.pbtxt": b"y"}
    assert (tmp_path / "m.ZIP.out" / "empty").is_dir()


def _zip(path: Path, name: str, **of_member: int) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x" * len(name), "body")
    raw = path.read_bytes().replace(b"x" * len(name), name.encode())
    for field, value in of_member.items():
        # The same two bytes of the local header (behind its signature) and of the central directory's.
        local, central = {"flags": (6, 8), "method": (8, 10)}[field]
        for signature, place in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
            at = raw.index(signature) + place
            raw = raw[:at] + value.to_bytes(2, "little") + raw[at + 2 :]
    path.write_bytes(raw)
    return path


def test_a_zip_that_needs_a_password_or_an_unknown_method_says_so(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"it: not a readable archive: .*password"):
        unpacked(_zip(tmp_path / "secret.zip", "a", flags=1))
    with pytest.raises(Failed, match=r"it: not a readable archive: .*compression"):
        unpacked(_zip(tmp_path / "odd.zip", "a", method=77))


@pytest.mark.parametrize("name", ["/abs", "../up", "a\\b"])
def test_a_zip_may_not_climb_either(tmp_path: Path, name: str) -> None:
    with pytest.raises(Failed, match="would leave the model's directory"):
        unpacked(_zip(tmp_path / "m.zip", name))


def test_directories_need_not_be_told_before_what_is_in_them_nor_only_once(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "m.tar", "w") as archive:
        for name in ("a/b/c", "a/b/c", "a"):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        archive.addfile(tarfile.TarInfo("a/b/x/y"))
        archive.addfile(tarfile.TarInfo("a/b/x/z"))
    assert sorted(unpacked(tmp_path / "m.tar")) == ["a/b/x/y", "a/b/x/z"]
    assert (tmp_path / "m.tar.out" / "a" / "b" / "c").is_dir()


def test_an_archive_that_is_cut_off_says_so(tmp_path: Path) -> None:
    source = tar_of(tmp_path / "m.tar.gz", [("a", bytes(range(256)) * 100)], "w:gz")
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(Failed, match="it: not a readable archive"):
        unpacked(source)


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_name_that_is_not_utf_8_refuses_the_archive(tmp_path: Path, kind: int) -> None:
    """node D8: it ended with a traceback when the list of files was made."""
    with tarfile.open(tmp_path / "m.tar", "w", format=kind, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo("1/modèle.py"))
    with pytest.raises(Failed, match=r"^it: member '1/mod\\udce8le.py' has a name that is not UTF-8$"):
        unpacked(tmp_path / "m.tar")


def test_a_zip_whose_name_only_says_that_it_is_utf_8_is_refused(tmp_path: Path) -> None:
    """node D8."""
    with zipfile.ZipFile(tmp_path / "n.zip", "w") as archive:
        archive.writestr("é", "body")
    (tmp_path / "n.zip").write_bytes((tmp_path / "n.zip").read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(Failed, match=r"it: not a readable archive: .*utf-8"):
        unpacked(tmp_path / "n.zip")


def test_a_zip_with_a_member_without_a_name_says_so(tmp_path: Path) -> None:
    """node D8: it ended with a traceback."""
    with pytest.raises(Failed, match="it: not a readable archive"):
        unpacked(_zip(tmp_path / "m.zip", "\0"))


SPARSE = {
    "no number": {"GNU.sparse.map": "0,x", "GNU.sparse.size": "1"},
    "an odd number of them": {"GNU.sparse.map": "0", "GNU.sparse.size": "1"},
    "no size": {"GNU.sparse.map": "0,1", "GNU.sparse.size": "big"},
    "of format 1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"},
    "backwards": {"GNU.sparse.map": "-5,-5", "GNU.sparse.size": "-1"},
    "far away": {"GNU.sparse.map": f"{10**30},1", "GNU.sparse.size": "1"},
}


@pytest.mark.parametrize("case", SPARSE)
def test_a_sparse_map_that_is_broken_ends_as_an_archive_that_is(tmp_path: Path, case: str) -> None:
    """node D8: it ended with a traceback."""
    with tarfile.open(tmp_path / "m.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("1/model.py")
        info.size, info.pax_headers = 600, SPARSE[case]
        archive.addfile(info, io.BytesIO(b"no map\n" * 100))
    with suppress(Failed):  # some are read as files with holes
        unpacked(tmp_path / "m.tar")


@pytest.mark.usefixtures("no_floor")
def test_whatever_is_damaged_in_the_headers_of_an_archive_it_ends_with_a_reason(tmp_path: Path) -> None:
    """node D8: each byte of the headers, by chance; nothing but Failed may come out."""
    chance = random.Random(8)
    with tarfile.open(tmp_path / "m.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("1/" + "x" * 120)
        info.size, info.pax_headers = 5, {"GNU.sparse.map": "0,1,3,1", "GNU.sparse.size": "5", "mtime": "1.5"}
        archive.addfile(info, io.BytesIO(b"abcde"))
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as zip:
        zip.writestr("1/modèle.py", "x" * 50)
    for name in ("m.tar", "m.zip"):
        whole = (tmp_path / name).read_bytes()
        for _ in range(200):
            broken = bytearray(whole)
            for _ in range(chance.randint(1, 3)):
                broken[chance.randrange(min(len(whole), 2048))] = chance.choice(b"\0\xff-+09,=x/")
            (tmp_path / name).write_bytes(broken)
            with suppress(Failed):
                unpacked(tmp_path / name)
            shutil.rmtree(tmp_path / f"{name}.out")


@pytest.mark.parametrize("name", ["m.tar", "m.tar.gz", "m.tgz", "M.ZIP"])
def test_what_an_archive_is_called(name: str) -> None:
    assert is_archive(name)
    assert not is_archive(name + ".onnx")
