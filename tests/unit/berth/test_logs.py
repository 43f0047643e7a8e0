"""Log lines."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.logs import configure_logging, fields, one_line


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(format: str, level: str, say: Callable[[logging.Logger], object], capsys: Any) -> list[str]:
    configure_logging(format=format, level=level)
    say(logging.getLogger("berth.x"))
    lines: list[str] = capsys.readouterr().err.splitlines()
    return lines


def test_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = logged(
        "text",
        "info",
        lambda log: log.warning("two\nlines", extra=fields(pod="a b", none="", q='"', n=3, path="c\\d\r")),
        capsys,
    )
    stamp, _, rest = line.partition(" ")
    assert len(stamp.split(".")[1]) == 3
    assert rest == 'warning berth.x: two\\nlines pod="a b" none="" q="\\"" n=3 path=c\\\\d\\r'


def test_a_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = logged(
        "json",
        "info",
        lambda log: log.info("x", extra=fields(n=1, f=0.5, b=True, none=None, peer=Endpoint("h", 1))),
        capsys,
    )
    said = json.loads(line)
    time = said.pop("time")
    assert time.endswith("Z")
    assert len(time) == len("2026-01-01T00:00:00.000Z")
    assert said == {
        "level": "info",
        "logger": "berth.x",
        "message": "x",
        "n": 1,
        "f": 0.5,
        "b": True,
        "none": None,
        "peer": "h:1",
    }


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_crash_is_reported_with_its_traceback(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(log: logging.Logger) -> None:
        try:
            raise RuntimeError("bug")
        except RuntimeError:
            log.exception("crashed")

    lines = logged(format, "info", crash, capsys)
    if format == "json":
        (line,) = lines
        assert json.loads(line)["exception"].endswith("RuntimeError: bug")
    else:
        assert lines[0].endswith("error   berth.x: crashed")
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[-1] == "RuntimeError: bug"


def test_only_what_is_severe_enough_is_reported_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(format="text", level="info")
    lines = logged("text", "warning", lambda log: (log.info("a"), log.warning("b")), capsys)
    assert [line.rpartition(" ")[2] for line in lines] == ["b"]
    assert one_line("a\\n\n") == "a\\\\n\\n"


def test_json_logs_are_one_object_a_line_whatever_is_logged() -> None:
    stderr, handlers, level = io.StringIO(), logging.root.handlers[:], logging.root.level
    try:
        with redirect_stderr(stderr):
            configure_logging(format="json", level="info")
            logging.getLogger("x").info("two\nlines", extra=fields(pod='a"b\n', count=1))
    finally:
        logging.root.handlers[:], logging.root.level = handlers, level
    line = json.loads(stderr.getvalue())
    assert (line["message"], line["pod"], line["count"]) == ("two\nlines", 'a"b\n', 1)
