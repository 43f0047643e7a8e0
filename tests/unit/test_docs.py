"""The documents: links lead somewhere, lines can be read beside code, and words are the field's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md"), *ROOT.glob("bench/*.md")]
)
# What users read first; a decision keeps the words of its day where it quotes them.
GUIDES: Final = [page for page in PAGES if "decisions" not in page.parts]
_LONGEST: Final = 120

# Berth's own words of the beginning, and the field's that stand in their place.
OLD_WORDS: Final = {
    r"\bcopies of (?:a|the|each|every) model\b|\bcop(?:y|ies) (?:is|are|that|which|goes|comes)\b": "replica",
    r"\b(?:model's|pod's) door\b|\bdoors?\b": "the pod's proxy",
    r"\bthe (?:one|only) way to Triton\b": "node gateway",
    r"\bFOREIGN\b|\bforeign (?:use|memory)\b": "other use",
    r"\bplaceable\b": "schedulable",
    r"\bclipped\b": "capacity-limited",
    r"\bheld requests?\b|\brequests? (?:is|are) held\b": "buffered requests",
    r"\bsleeping models?\b|\bmodels? that sleeps?\b|\bwhile it sleeps\b": "scaled to zero",
    r"\bASKED FOR\b|\bAIM\b|\bBOUNDS\b": "REQUESTED, TARGET, SCALE",
    r"\bghosts?\b": "stale models",
}


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are neither code nor a table."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")):
            yield number, line


def _anchor(heading: str) -> str:
    """As GitHub makes it: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.strip().replace("`", "").lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_short(page: Path) -> None:
    assert [number for number, line in _prose(page) if len(line) > _LONGEST] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.parametrize("old", OLD_WORDS)
def test_words_are_the_fields(page: Path, old: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", page.read_text())
    assert re.findall(old, text) == [], f"say {OLD_WORDS[old]!r}"
