"""The decider behind lines: answers, words for what is wrong, and what a recorder writes."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from berth.runtime.errors import Failed
from scaler import replaying
from scaler.decision.load import Stat
from scaler.decision.replay import BadLine, Replay, del_line, model_line, scale_line, stat_line

GROUP = "autoscaling.knative.dev/"
SECOND = 1_000_000_000
NEW = {"op": "new", "id": "m", "t": 0, "ready": 1, "scrape": True}


def asked(*lines: dict[str, Any]) -> list[Any]:
    core = Replay()
    return [core.answer(json.dumps(line)) for line in lines]


def scale(t: float, ready: int = 1) -> dict[str, Any]:
    return {"op": "scale", "id": "m", "t": t, "ready": ready}


def stat(t: float, c: float, **more: float) -> dict[str, Any]:
    return {"op": "stat", "id": "m", "t": t, "c": c, **more}


def valid(desired: int, ebc: int, *, in_panic: bool = False) -> dict[str, Any]:
    return {"valid": True, "desired": desired, "ebc": ebc, "in_panic": in_panic}


UNKNOWN = {"valid": False, "desired": 0, "ebc": 0}


def test_one_report_from_one_replica() -> None:
    new = {**NEW, "annotations": {GROUP + "target": "10"}}
    assert asked(new, stat(1, 50), scale(2)) == [{}, None, valid(8, -251, in_panic=True)]


def test_four_replicas_and_nothing_known() -> None:
    told = asked({**NEW, "ready": 4}, scale(0, 4), stat(0, 1), scale(2, 4), scale(60, 4), scale(61, 4))
    assert told == [
        {},
        {**UNKNOWN, "in_panic": True},
        None,
        valid(4, 188, in_panic=True),
        valid(4, 189, in_panic=True),
        {**UNKNOWN, "in_panic": True},
    ]


def test_two_thirds() -> None:
    """Six decimals of an average decide."""
    annotations = {GROUP + "target": "0.333333", GROUP + "target-utilization-percentage": "100"}
    told = asked({**NEW, "annotations": annotations}, stat(1, 1), stat(2, 1), stat(3, 0), scale(3, 3))
    assert told[-1]["desired"] == 3


def test_nobody_is_asked_and_nobody_reports() -> None:
    assert asked({**NEW, "scrape": False}, scale(100))[1] == valid(0, -111)
    assert asked({"op": "new", "id": "m"}, {"op": "scale", "id": "m"})[1] == valid(0, -211)


def test_requests_are_another_metric() -> None:
    new = {**NEW, "annotations": {GROUP + "metric": "rps", GROUP + "target": "10"}}
    assert asked(new, stat(1, 50, n=21, pn=1), scale(1))[2]["desired"] == 3


def test_an_update_keeps_what_was_reported_and_a_refused_one_changes_nothing() -> None:
    update = {**NEW, "op": "update", "t": 2, "annotations": {GROUP + "target": "100"}}
    refused = {**update, "annotations": {GROUP + "window": "5s"}}
    new = {**NEW, "annotations": {GROUP + "target": "10"}}
    told = asked(new, stat(1, 7), refused, scale(2), update, scale(2))
    assert told[2] == {"err": f"{GROUP}window: '5s' is invalid; use a duration, 6s to 1h"}
    assert [told[3]["desired"], told[4], told[5]["desired"]] == [1, {}, 1]
    assert [told[3]["ebc"], told[5]["ebc"]] == [-208, -118]


def test_what_is_gone_is_not_there() -> None:
    told = asked(NEW, {"op": "del", "id": "m"}, stat(1, 1), scale(1), {**NEW, "op": "update"})
    assert told[1:3] == [{}, None]
    assert told[3] == told[4] == {"err": 'id: there is no "m"; a line with op new makes it'}


def test_new_begins_anew() -> None:
    assert asked(NEW, stat(1, 500), NEW, scale(1))[3] == {**UNKNOWN, "in_panic": False}


def test_a_number_is_an_id_too() -> None:
    assert asked({**NEW, "id": 7}, {"op": "scale", "id": 7, "t": 0})[1]["valid"] is False


@pytest.mark.parametrize(
    ("t", "last", "desired"),
    [
        # A window after panic it goes on, a moment later it does not: to the nanosecond, today as in 1970.
        (0.1, 60.1, 8),
        (0.1, 60.100000001, 1),
        (1_700_000_000.3, 1_700_000_060.3, 8),
        (1_700_000_000.3, 1_700_000_060.300001, 1),
    ],
)
def test_fractions_of_seconds(t: float, last: float, desired: int) -> None:
    new = {**NEW, "t": t, "annotations": {GROUP + "target": "10", GROUP + "window": "60s"}}
    told = asked(new, stat(t, 50), scale(t), stat(last, 1), scale(last))
    assert (told[2]["desired"], told[4]["desired"]) == (8, desired)


BAD: dict[str, str] = {
    "": "'' is not JSON: Expecting value",
    "{": "'{' is not JSON",
    "[1]": "'[1]' is not a JSON object; write {\"op\": ...}",
    "NaN": "is not JSON: NaN is no number of JSON",
    "{}": "op: nothing is none; write one of new, update, stat, scale, del",
    '{"op": "scal", "id": "m"}': 'op: "scal" is none; write one of',
    '{"op": ["new"], "id": "m"}': 'op: ["new"] is none; write one of',
    '{"op": "new"}': "id: nothing is invalid; use a text or a whole number",
    '{"op": "new", "id": true}': "id: true is invalid",
    '{"op": "new", "id": "m", "t": "1"}': 't: "1" is invalid; use a number',
    '{"op": "new", "id": "m", "t": 1e400}': "t: Infinity is invalid; use a number",
    '{"op": "new", "id": "m", "t": 1e12}': "t: 1e+12 is not a time; write seconds since 1970",
    '{"op": "new", "id": "m", "ready": -1}': "ready: -1 is invalid; use a whole number, 0 to 2147483647",
    '{"op": "new", "id": "m", "ready": 1.0}': "ready: 1.0 is invalid",
    '{"op": "new", "id": "m", "ready": 2147483648}': "ready: 2147483648 is invalid",
    '{"op": "new", "id": "m", "scrape": 1}': "scrape: 1 is invalid; use true or false",
    '{"op": "new", "id": "m", "annotations": []}': "annotations: [] is invalid; use an object of texts",
    '{"op": "new", "id": "m", "config": {"max-scale": 1}}': "config: max-scale: 1 is invalid; use a text, in quotes",
    '{"op": "new", "id": "m", "containerConcurrency": -1}': "containerConcurrency: -1 is invalid",
    '{"op": "stat", "id": "m", "c": null}': "c: nothing is invalid; use a number",
    '{"op": "stat", "id": "m", "n": ' + "9" * 400 + "}": "n: 9999",
    "[" * 100_000: "is not JSON",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:60])
def test_bad_lines(line: str) -> None:
    core = Replay()
    with pytest.raises(BadLine) as caught:
        core.answer(line)
    assert BAD[line] in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.answered == ('"stat"' not in line)


def test_what_a_recorder_writes_is_decided_the_same() -> None:
    lines = [
        model_line(
            "ä/m",
            1_700_000_000 * SECOND,
            is_new=True,
            ready=1,
            config={"stable-window": "30s"},
            annotations={GROUP + "target": "10"},
            container_concurrency=4,
            reachable=True,
            scraped=True,
        ),
        stat_line("ä/m", 1_700_000_001 * SECOND, Stat(50, 0.5, 3, 1)),
        scale_line("ä/m", 1_700_000_002 * SECOND + SECOND // 4, ready=1),
        del_line("ä/m"),
    ]
    assert [json.loads(line) for line in lines] == [
        {
            "op": "new",
            "id": "ä/m",
            "t": 1_700_000_000,
            "ready": 1,
            "config": {"stable-window": "30s"},
            "annotations": {GROUP + "target": "10"},
            "containerConcurrency": 4,
            "unreachable": False,
            "scrape": True,
        },
        {"op": "stat", "id": "ä/m", "t": 1_700_000_001, "c": 50, "pc": 0.5, "n": 3, "pn": 1},
        {"op": "scale", "id": "ä/m", "t": 1_700_000_002.25, "ready": 1},
        {"op": "del", "id": "ä/m"},
    ]
    assert all(line.endswith("}\n") and line.count("\n") == 1 for line in lines)
    core = Replay()
    assert [core.answer(line) for line in lines] == [{}, None, valid(18, -257, in_panic=True), {}]
    assert (
        json.loads(model_line("m", 0, **{**RECORDED, "is_new": False, "reachable": False}))["op"] == "update"
    )


RECORDED: dict[str, Any] = {
    "is_new": True,
    "ready": 0,
    "config": {},
    "annotations": {},
    "container_concurrency": 0,
    "reachable": True,
    "scraped": True,
}

# --- the command


def lines_of(*lines: dict[str, Any] | str) -> bytes:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()


def test_each_line_is_answered_and_the_first_bad_one_is_named_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = lines_of(NEW, "", "nonsense", stat(1, 50), '{"op": "stat", "id": "m", "t": "x"}', scale(2))
    with pytest.raises(Failed) as caught:
        replaying.replay(io.BytesIO(data[:-1]), "a file")
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sorted(answer) for answer in answers] == [[], ["err"], ["desired", "ebc", "in_panic", "valid"]]
    assert answers[1]["err"].startswith("line 3: 'nonsense' is not JSON")
    assert str(caught.value).startswith(
        "a file: 2 of its lines could not be read, the first: line 3: 'nonsense'"
    )


def test_lines_that_are_no_text_or_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    data = lines_of(NEW) + b"\xff\n" + b" " * (1 << 20) + b"{" + b" " * (3 << 20) + b"\n" + lines_of(scale(1))
    with pytest.raises(Failed):
        replaying.replay(io.BytesIO(data), "a file")
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers[1:] == [
        {"err": "line 2: it is not UTF-8: invalid start byte at byte 0"},
        {"err": "line 3: it is longer than 1048576 bytes"},
        {**UNKNOWN, "in_panic": False},
    ]


def command(*arguments: str, **more: Any) -> "subprocess.Popen[bytes]":
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, "-m", "berth.cli", "scaler", "--log-level=error", *arguments], **{**pipes, **more}
    )


def test_a_pipe_is_answered_at_once_and_a_signal_ends_it() -> None:
    with command("--replay", "-") as process:
        assert process.stdin
        assert process.stdout
        for line, answer in ((NEW, b"{}\n"), (scale(1), b'{"valid": false')):
            process.stdin.write(lines_of(line))
            process.stdin.flush()
            assert process.stdout.readline().startswith(answer)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(lines_of(NEW, scale(1)))
    with command("--replay", str(file)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out.count(b"\n"), err) == (0, 2, b"")


def test_a_file_that_is_not_there_and_a_reader_that_has_gone(tmp_path: Path) -> None:
    with command("--replay", str(tmp_path / "none")) as process:
        assert (
            process.communicate(timeout=60)[1]
            == f"berth scaler: --replay: {tmp_path}/none: No such file or directory\n".encode()
        )
    assert process.returncode == 2
    read, write = os.pipe()
    os.close(read)
    with command("--replay", "-", stdout=write) as process:
        os.close(write)
        assert (
            process.communicate(lines_of(NEW), timeout=60)[1]
            == b"berth scaler: the reader of the answers has closed the pipe\n"
        )
    assert process.returncode == 1
