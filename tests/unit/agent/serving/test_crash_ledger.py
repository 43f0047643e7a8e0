"""Marks, suspects and quarantine, and the journal that keeps them."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from agent.serving.crash_ledger import MOST_ENTRIES, CrashLedger
from berth.contract.errors import InvalidValue
from berth.contract.ids import ServerName

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
A, B = "a" * 64, "b" * 64
HOUR = timedelta(hours=1)


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


def test_only_what_was_alone_and_suspect_is_quarantined() -> None:
    ledger = CrashLedger()
    begin(ledger, A)
    begin(ledger, B)
    assert ledger.died(triton="2.51", now=NOW) is None
    assert ledger.is_suspect(A)
    assert ledger.is_suspect(B)
    begin(ledger, B)
    assert ledger.clear(B, ServerName("bbb"))
    assert not ledger.is_suspect(B)
    begin(ledger, A)
    culprit = ledger.died(triton="2.51", now=NOW)
    assert culprit is not None
    assert (culprit.digest, culprit.backend, culprit.until) == (A, "python", NOW + 24 * HOUR)
    assert not ledger.is_suspect(A)


def test_never_in_company_however_often() -> None:
    ledger = CrashLedger()
    for _ in range(10):
        begin(ledger, A)
        begin(ledger, B)
        assert ledger.died(triton="2.51", now=NOW) is None


def test_the_same_files_under_two_names_are_company_and_suspect_together() -> None:
    ledger = CrashLedger()
    begin(ledger, A, "one")
    begin(ledger, A, "two")
    assert ledger.died(triton="2.51", now=NOW) is None
    begin(ledger, A, "three")
    culprit = ledger.died(triton="2.51", now=NOW)
    assert culprit is not None
    assert culprit.digest == A


def test_a_triton_that_is_stopped_in_the_middle_of_a_load_once_has_not_died_of_it() -> None:
    ledger = CrashLedger()
    begin(ledger, A)
    assert ledger.died(triton="2.51", now=NOW) is None
    assert ledger.is_suspect(A)


def test_a_death_while_nothing_loads_is_nobodys_and_makes_the_evidence_weaker() -> None:
    ledger = CrashLedger()
    assert ledger.died(triton="2.51", now=NOW) is None
    for _ in range(2):
        begin(ledger, A)
        assert ledger.died(triton="2.51", now=NOW) is None
    begin(ledger, A)
    assert ledger.died(triton="2.51", now=NOW) is not None
    # An hour later that death says nothing any more.
    begin(ledger, B)
    assert ledger.died(triton="2.51", now=NOW + HOUR) is None
    begin(ledger, B)
    assert ledger.died(triton="2.51", now=NOW + HOUR) is not None


def load(
    ledger: CrashLedger, digest: str, name: str, *, namespace: str = "mine", has_code: bool = False
) -> None:
    ledger.begin(
        digest,
        backend="onnxruntime",
        name=ServerName(name),
        now=NOW,
        namespace=namespace,
        has_code=has_code,
    )


def is_quarantined(ledger: CrashLedger, digest: str, namespace: str) -> bool:
    return ledger.quarantined(digest, "2.51", NOW, namespace=namespace) is not None


def killed(ledger: CrashLedger, *, times: int = 2, with_code: bool, **more: bool) -> None:
    """Triton, while files A of namespace `mine` were loaded alone; beside code of that namespace's, that serves."""
    for _ in range(times):
        if with_code:
            load(ledger, B, "program", has_code=True)
            ledger.clear(B, ServerName("program"))
        load(ledger, A, "data")
        ledger.died(triton="2.51", now=NOW, **more)


@pytest.mark.parametrize(
    ("with_code", "more", "times", "for_others"),
    [
        (False, {}, 2, True),
        (True, {}, 2, False),
        (False, {"had_requests": True}, 5, False),
    ],
)
def test_files_are_quarantined_for_others_only_where_nothing_else_can_have_killed_triton(
    with_code: bool, more: dict[str, bool], times: int, for_others: bool
) -> None:
    """node D5: else a tenant has a neighbour's files refused: it loads them, and kills Triton by other means."""
    ledger = CrashLedger()
    killed(ledger, times=times, with_code=with_code, **more)
    for again in (ledger, read_again(ledger)):
        assert is_quarantined(again, A, "mine")
        assert is_quarantined(again, A, "theirs") is for_others
    (one,) = ledger.all_quarantined(NOW)
    assert ("for namespace mine" in one.reason("lift")) is not for_others
    ledger.lift("all", NOW)
    assert not is_quarantined(ledger, A, "mine")


def test_a_program_that_kills_triton_as_it_is_loaded_is_no_doubt_of_its_own() -> None:
    ledger = CrashLedger()
    for _ in range(2):
        load(ledger, A, "program", has_code=True)
        ledger.died(triton="2.51", now=NOW)
    assert is_quarantined(ledger, A, "theirs")


def test_deaths_in_doubtful_company_count_for_no_other_namespace() -> None:
    """node D5: nor is what others load suspect for them, or loaded alone and last."""
    ledger = CrashLedger()
    killed(ledger, times=1, with_code=True)
    assert ledger.is_suspect(A, "mine")
    assert not ledger.is_suspect(A, "theirs")
    load(ledger, A, "theirs", namespace="theirs")
    assert ledger.died(triton="2.51", now=NOW) is None
    killed(ledger, times=1, with_code=False)  # the first death is in doubt as before
    assert is_quarantined(ledger, A, "mine")
    assert not is_quarantined(ledger, A, "theirs")


def test_code_that_is_gone_may_have_left_something_behind_until_triton_starts_anew() -> None:
    ledger = CrashLedger()
    load(ledger, B, "program", has_code=True)
    ledger.clear(B, ServerName("program"))
    ledger = read_again(ledger)  # nor does an agent forget it that starts anew
    load(ledger, A, "data")
    ledger.died(triton="2.51", now=NOW)
    assert not ledger.is_suspect(A, "theirs")
    load(ledger, "c" * 64, "other")
    ledger.died(triton="2.51", now=NOW)
    assert ledger.is_suspect("c" * 64, "theirs")


@pytest.mark.parametrize("end", ["died", "restarted"])
def test_two_programs_are_company_for_each_other_and_a_new_triton_has_none(end: str) -> None:
    ledger = CrashLedger()
    for name in ("one", "two", "three"):
        load(ledger, name, name, has_code=True)
        ledger.clear(name, ServerName(name))
    load(ledger, A, "one", has_code=True)
    ledger.died(triton="2.51", now=NOW)
    assert not ledger.is_suspect(A, "theirs")
    load(ledger, "x", "one", has_code=True)
    ledger.clear("x", ServerName("one"))
    if end == "died":
        ledger.died(triton="2.51", now=NOW)
    else:
        ledger.restarted()
    load(ledger, B, "data")
    ledger.died(triton="2.51", now=NOW)
    assert ledger.is_suspect(B, "theirs")


def test_of_a_journal_that_does_not_tell_of_code_nothing_is_believed_for_others() -> None:
    text = json.loads(json.dumps(CrashLedger().encode(NOW)))
    del text["code"]
    ledger = CrashLedger.decode(json.dumps(text))
    killed(ledger, with_code=False)
    assert is_quarantined(ledger, A, "mine")
    assert not is_quarantined(ledger, A, "theirs")


def test_a_restart_on_purpose_charges_nobody() -> None:
    ledger = CrashLedger()
    begin(ledger, A)
    ledger.restarted()
    assert not ledger.is_suspect(A)
    assert ledger.open == []


def test_quarantine_is_of_bytes_on_a_version_of_triton_and_ends() -> None:
    ledger = poisoned(A)
    assert ledger.quarantined(A, "2.51", NOW) is not None
    assert ledger.quarantined(A, "2.52", NOW) is None
    assert ledger.quarantined(B, "2.51", NOW) is None
    assert ledger.quarantined(A, "2.51", NOW + 24 * HOUR - timedelta(seconds=1)) is not None
    assert ledger.quarantined(A, "2.51", NOW + 24 * HOUR) is None


def test_the_reason_tells_which_files_when_until_when_and_what_to_do() -> None:
    one = poisoned(A).quarantined(A, "2.51", NOW)
    assert one is not None
    said = one.reason("seldon.io/trtis-lift-quarantine")
    for part in (
        "a" * 12,
        "2026-05-01T12:00:00Z",
        "2026-05-02T12:00:00Z",
        "lift-quarantine=aaaaaaaaaaaa",
        "2.51",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("wish", "left"),
    [("all", []), ("aaaaaaaa", [B]), ("cccccccc", [A, B]), (f" {A} , bbbbbbbb,", []), ("", [A, B])],
)
def test_lifting(wish: str, left: list[str]) -> None:
    ledger = poisoned(A, B)
    ended = ledger.lift(wish, NOW)
    assert [one.digest for one in ledger.all_quarantined(NOW)] == left
    assert len(ended) == 2 - len(left)


def test_a_beginning_that_is_too_short_lifts_nothing_and_says_so() -> None:
    ledger = poisoned(A, B)
    with pytest.raises(InvalidValue, match="'aaa' is too short; write at least 8 characters"):
        ledger.lift("bbbbbbbb,aaa", NOW)
    assert len(ledger.all_quarantined(NOW)) == 2


def read_again(ledger: CrashLedger) -> CrashLedger:
    return CrashLedger.decode(json.dumps(ledger.encode(NOW)))


def test_a_new_agent_knows_all_that_was_known() -> None:
    ledger = poisoned(A)
    begin(ledger, B)
    ledger.died(triton="2.51", now=NOW)
    after = read_again(ledger)
    assert after.quarantined(A, "2.51", NOW) == ledger.quarantined(A, "2.51", NOW)
    assert after.is_suspect(B)
    begin(after, B)
    assert after.died(triton="2.51", now=NOW) is not None


@pytest.mark.parametrize(
    ("loaded", "remembers", "suspect"),
    [(set(), False, True), (set(), True, False), ({"aaa"}, False, False)],
)
def test_what_an_agent_before_left_open(loaded: set[ServerName], remembers: bool, suspect: bool) -> None:
    """How Triton ended, if it has, nobody has seen: nothing is quarantined by that."""
    ledger = CrashLedger()
    begin(ledger, A)
    after = read_again(ledger)
    after.inherit(loaded, remembers=remembers)
    assert after.is_suspect(A) is suspect
    assert not after.is_suspect(A, "theirs")  # nor has anybody seen what else was in it
    assert [mark.name for mark in after.open] == sorted(loaded)
    assert after.all_quarantined(NOW) == []


def test_agents_that_die_with_a_mark_do_not_quarantine_anybody_however_often() -> None:
    ledger = CrashLedger()
    for _ in range(10):
        begin(ledger, A)
        ledger = read_again(ledger)
        ledger.inherit(set(), remembers=False)
    assert ledger.all_quarantined(NOW) == []


def test_a_load_that_a_dead_agent_has_begun_is_nobodys_death_alone() -> None:
    ledger = CrashLedger()
    for _ in range(5):
        begin(ledger, A)
        ledger = read_again(ledger)
        ledger.inherit({ServerName("aaa")}, remembers=True)
        assert ledger.died(triton="2.51", now=NOW) is None


def test_the_journal_is_bounded() -> None:
    ledger = CrashLedger()
    for number in range(4 * MOST_ENTRIES):
        digest = f"{number:064d}"
        for _ in range(2):
            ledger.begin(digest, backend="x" * 64, name=ServerName("m" * 64), now=NOW)
            ledger.died(triton="2.51", now=NOW)
        begin(ledger, f"{number:064x}")
        ledger.died(triton="2.51", now=NOW)
    text = json.dumps(ledger.encode(NOW))
    assert len(text) < 256 * 1024
    newest = f"{4 * MOST_ENTRIES - 1:064d}"
    assert CrashLedger.decode(text).quarantined(newest, "2.51", NOW) is not None


def test_a_clock_that_was_set_back_makes_no_quarantine_longer() -> None:
    ledger = poisoned(A)
    assert ledger.quarantined(A, "2.51", NOW - 23 * HOUR) is not None
    assert ledger.quarantined(A, "2.51", NOW - 25 * HOUR) is None


def test_a_restart_on_purpose_acquits_nobody_either() -> None:
    ledger = CrashLedger()
    begin(ledger, A)
    ledger.died(triton="2.51", now=NOW)
    begin(ledger, B)
    ledger.restarted()
    assert (ledger.is_suspect(A), ledger.is_suspect(B), ledger.open) == (True, False, [])


def test_a_suspicion_is_forgotten_after_a_day_and_a_load_under_way_never() -> None:
    ledger = CrashLedger()
    begin(ledger, A)
    ledger.died(triton="2.51", now=NOW)
    begin(ledger, B)
    kept = [CrashLedger.decode(json.dumps(ledger.encode(NOW + hours * HOUR))) for hours in (23, 25)]
    assert [one.is_suspect(A) for one in kept] == [True, False]
    assert [[mark.digest for mark in one.open] for one in kept] == [[B], [B]]


def test_where_requests_were_in_triton_as_well_a_load_is_charged_later_but_not_never() -> None:
    ledger, deaths = CrashLedger(), 0
    while not ledger.all_quarantined(NOW):
        begin(ledger, A)
        ledger.died(triton="2.51", now=NOW, had_requests=True)
        deaths += 1
    assert deaths == 5
    alone, deaths = CrashLedger(), 0
    while not alone.all_quarantined(NOW):
        begin(alone, A)
        alone.died(triton="2.51", now=NOW)
        deaths += 1
    assert deaths == 2
