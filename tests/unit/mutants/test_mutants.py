"""The mutation tests' own parts: what is changed, what is left alone, and that a tested rule is noticed."""

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutants.__main__ import (
    EQUIVALENT,
    PACKAGES,
    ROOT,
    all_changes,
    choose,
    equivalents,
    new_lines,
    parsed,
    since,
    sources,
)
from tests.mutants.changes import Change, changes_of, sample
from tests.mutants.table import up_to_date
from tests.mutants.trial import Court


def changes(path: Path, source: str) -> list[Change]:
    (path / "shop.py").write_text(dedent(source))
    return changes_of(path, "shop.py")


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        ("a = b < c", "comparison", {"a = b <= c", "a = b >= c"}),
        ("a = b is not c", "comparison", {"a = b is c"}),
        ("a = b and c or d", "condition", {"a = (b or c) or d", "a = ((b and c) and d)"}),
        ("while a: b", "condition", {"while (not a): b"}),
        ("if not a: b", "condition", {"if a: b"}),
        ("if a == b: c", "condition", set()),
        ("a = [b for b in c if b.d]", "condition", {"a = [b for b in c if (not b.d)]"}),
        ("a = True", "constant", {"a = False"}),
        ("a = b[0]", "constant", {"a = b[1]", "a = b[-1]"}),
        ("a = 250", "constant", {"a = 0", "a = 25000"}),
        ("a = 'k'", "constant", {"a = ''"}),
        ("a = f(b + c).d", "call", {"a = None.d", "a = (b + c).d"}),
        ("f(a)", "call", {"None"}),
        ("async def f(): a = await b(c)", "call", {"async def f(): a = None", "async def f(): a = c"}),
        ("raise A(f(b))", "call", {"raise A(None)", "raise A(b)"}),
        ("def f(): return a", "return", {"def f(): return None"}),
        ("def f() -> bool: return a", "return", {"def f() -> bool: return (not a)"}),
        ("def f(): return a == b", "return", {"def f(): return not a == b"}),
    ],
)
def test_one_node_is_changed(tmp_path: Path, before: str, kind: str, after: set[str]) -> None:
    found = [one for one in changes(tmp_path, before) if one.kind == kind]
    assert {one.after for one in found} == after
    assert {one.apply(before.encode()).decode() for one in found} == after


@pytest.mark.parametrize(
    "source",
    [
        '"a.docstring"',
        "a = 'a text for people'",
        "a = f'{b(1)}/x'",
        "log.info('started', extra=f(1))",
        "_log.warning('x')",
        "g: dict['K', 1]",
        "def f(a: T[1] = b) -> T[2]: ...",
        "@f(1)\ndef g(): ...",
        "A = NewType('A', str)",
        "__all__ = ['a']",
        "assert a > 1",
        "if TYPE_CHECKING: import b",
        "def f(): return None",
        "with a() as b: ...",
    ],
)
def test_what_breaks_no_rule_is_left_alone(tmp_path: Path, source: str) -> None:
    assert changes(tmp_path, source) == []


def test_a_change_of_several_lines_moves_no_line(tmp_path: Path) -> None:
    source = "a = f(\n    b,\n    c,\n)\nd = 1\n"
    (left_out, *_) = changes(tmp_path, source)
    assert left_out.apply(source.encode()) == b"a = (None\n\n\n)\nd = 1\n"
    assert left_out.lines == (1, 2, 3, 4)


def test_a_statement_with_a_body_is_run_where_its_head_is(tmp_path: Path) -> None:
    found = changes(tmp_path, "match a:\n    case 1:\n        b = 2\n    case 3 if c:\n        d = 4\n")
    assert {(one.line, one.lines) for one in found} == {(n, (n,)) for n in (2, 3, 4, 5)}


def test_a_change_is_known_again_when_lines_have_moved(tmp_path: Path) -> None:
    source = "class A:\n    def f(self):\n        return self.b > 1\n"
    assert {one.key for one in changes(tmp_path, source)} == {
        one.key for one in changes(tmp_path, "import x\n\n" + source)
    }
    assert changes(tmp_path, source)[0].function == "A.f"


def test_a_sample_is_the_same_for_a_seed_and_takes_as_many_of_each_kind(tmp_path: Path) -> None:
    found = changes(tmp_path, "def f():\n" + "    a(b, 1)\n" * 50 + "    if c > 1 and d: e\n" * 50)
    first = sample(found, 40, "1 shop")
    assert first == sample(found, 40, "1 shop") != sample(found, 40, "2 shop")
    kinds = [one.kind for one in first]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("call", "comparison", "condition", "constant"), 10
    )
    assert len({(one.start, one.end, one.kind) for one in first}) == 40, "one change for each place"


def test_every_change_of_ours_can_be_compiled() -> None:
    for package in PACKAGES:
        for change in sample(all_changes(ROOT, package), 40, "any"):
            source = (ROOT / change.file).read_bytes()
            changed = change.apply(source)
            assert changed.count(b"\n") == source.count(b"\n")
            ast.parse(changed)


def test_generated_code_is_left_alone() -> None:
    assert not [file for file in sources(ROOT, "berth") if file.endswith(("_pb2.py", "_pb2_grpc.py"))]


def test_every_equivalent_is_a_change_that_there_is_and_has_a_reason() -> None:
    known = equivalents(EQUIVALENT.read_text())
    assert all(known.values())
    assert known.keys() <= {change.key for package in PACKAGES for change in all_changes(ROOT, package)}


def test_a_change_is_noticed_where_a_test_is_of_its_rule(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "unit" / "shop"
    tests.mkdir(parents=True)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "till.py").write_text(
        dedent("""\
        LIMIT = 3

        def is_full(count):
            return count >= LIMIT

        def wait(count):
            while count:
                count = count - 1

        def unused():
            return 7
        """)
    )
    (tests / "test_till.py").write_text(
        dedent("""\
        from shop.till import is_full, wait

        def test_full():
            assert is_full(10) and not is_full(1)

        def test_wait():
            wait(3)
        """)
    )
    table, court = up_to_date(tmp_path, ("shop",)), Court(tmp_path)
    assert table.stale() == []
    told = {}
    for change in changes_of(tmp_path, "shop/till.py"):
        outcome = court.run(change, table.tests_of(change.file, change.lines, change.at_import))
        told[change.after] = outcome.noticed_by.partition("::")[2] or outcome.noticed_by
        if told[change.after] in (
            "ended by SIGPROF",
            "ended by SIGALRM",
        ):  # on a busy machine the clock is first
            told[change.after] = "ended"
    assert told == {
        "LIMIT = 0": "test_full",
        "LIMIT = 300": "test_full",
        "return count > LIMIT": "",
        "return count < LIMIT": "test_full",
        "return not count >= LIMIT": "test_full",
        "while (not count):": "",
        "count = count - 2": "ended",
        "count = count - 0": "ended",
        "return None": "",
        "return 0": "",
        "return 700": "",
    }
    assert {path.name for path in tmp_path.iterdir()} - {"build"} == {"shop", "tests"}

    (tests / "test_till.py").write_text("")
    assert table.stale() == ["tests/unit/shop/test_till.py"], "a changed test is run again"


def test_what_one_file_runs_on_import_is_still_known_when_another_is_run_again(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "unit" / "shop"
    tests.mkdir(parents=True)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "till.py").write_text("def price(n):\n    return n + 1\n")
    (tests / "test_price.py").write_text(
        "from shop.till import price\nPRICE = price(1)\ndef test_price(): assert PRICE == 2\n"
    )
    (tests / "test_other.py").write_text("import shop.till\ndef test_other(): pass\n")
    up_to_date(tmp_path, ("shop",))
    (tests / "test_other.py").write_text("import shop.till\ndef test_other(): assert shop.till\n")
    table = up_to_date(tmp_path, ("shop",))
    assert "tests/unit/shop/test_price.py::test_price" in table.tests_of("shop/till.py", (2,), False)


def test_what_is_new_is_known_by_the_lines_of_a_diff() -> None:
    diff = """\
diff --git a/binder/queue.py b/binder/queue.py
--- a/binder/queue.py
+++ b/binder/queue.py
@@ -3,0 +4,2 @@ class Queue:
+    first = 1
+    second = 2
@@ -9 +11 @@ def pop():
-    return None
+    return 1
@@ -20,3 +22,0 @@ def gone():
-    a
diff --git a/loader/old.py b/loader/old.py
--- a/loader/old.py
+++ /dev/null
@@ -1,2 +0,0 @@
-import a
"""
    assert new_lines(diff) == {"binder/queue.py": {4, 5, 11}, "/dev/null": frozenset()}


def test_the_lines_of_the_newest_commit_are_reported_by_git() -> None:
    told = since(ROOT, "HEAD")
    assert all(path.endswith(".py") for path in told)


def test_a_sample_of_what_is_new_holds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.mutants.__main__.since",
        lambda root, revision: {"berth/runtime/backoff.py": frozenset(range(999))},
    )
    arguments = parsed("--since=HEAD", "--count=20")
    chosen = choose(arguments)
    assert {one.file for one in chosen} == {"berth/runtime/backoff.py"}
