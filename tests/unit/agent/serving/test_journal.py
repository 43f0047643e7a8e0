"""The crash ledger on disk."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agent.serving.crash_ledger import CrashLedger
from agent.serving.journal import Journal
from berth.contract.ids import ServerName

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


A, B = "a" * 64, "b" * 64


def begin(ledger: CrashLedger, digest: str, name: str = "") -> None:
    ledger.begin(digest, backend="python", name=ServerName(name or digest[:3]), now=NOW)


def poisoned(*digests: str) -> CrashLedger:
    ledger = CrashLedger()
    for digest in digests:
        for _ in range(2):
            begin(ledger, digest)
            culprit = ledger.died(triton="2.51", now=NOW)
        assert culprit is not None
    return ledger


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"v": 9}', '{"v": 1, "marks": 3}', '{"v":1,"marks":[{}]}', "\0", "[" * 100_000]
)
def test_a_journal_that_cannot_be_read_is_reported_put_aside_and_not_fatal(tmp_path: Path, text: str) -> None:
    journal = Journal(tmp_path)
    journal.path.write_text(text)
    assert journal.read().all_quarantined(NOW) == []
    assert journal.failure
    assert not journal.path.exists()
    assert (tmp_path / "journal.unreadable").read_text() == text


def test_a_node_without_a_journal_has_no_failure(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.read().open == []
    assert journal.failure == ""


def test_killed_at_any_byte_of_a_write_the_last_journal_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call to the system that a write makes, and with every length of the new file."""
    journal = Journal(tmp_path)
    before, after = json.dumps(poisoned(A).encode(NOW)), json.dumps(poisoned(A, B).encode(NOW))
    journal.write(before)
    for length in range(0, len(after), 7):
        (tmp_path / "journal.new").write_text(after[:length])
        assert len(Journal(tmp_path).read().all_quarantined(NOW)) == 1
    order: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        order.append("sync")
        real_sync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        order.append("replace")
        assert (tmp_path / "journal.new").read_text() == after
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    journal.write(after)
    assert order == ["sync", "replace", "sync"]
    assert len(journal.read().all_quarantined(NOW)) == 2
