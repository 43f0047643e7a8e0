"""Every input that fuzzing has found worth keeping."""

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_corpus_holds(name: str) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert len(inputs) >= 10
    for path in inputs:
        try:
            TARGETS[name](path.read_bytes())
        except BaseException as error:
            raise AssertionError(f"{name} {path.name}: {error!r}") from error
