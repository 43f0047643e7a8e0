"""Parameters that name files: the interpreter that a python model comes with."""

import pytest

from agent.admission import (
    InvalidModel,
)
from tests.fakes.admission import PYTHON, PYTHON_CONFIG, judged

ENV = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "%s" } }'


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$$TRITON_MODEL_DIRECTORY/env.tar.gz", None),
        ("$$TRITON_MODEL_DIRECTORY/other.tar.gz", "there is no other.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/../env.tar.gz", "does not stay inside"),
        ("$$TRITON_MODEL_DIRECTORY", "TRITON_MODEL_DIRECTORY/FILE is taken"),
        ("/env.tar.gz", "TRITON_MODEL_DIRECTORY/FILE is taken"),
        ("env.tar.gz", "TRITON_MODEL_DIRECTORY/FILE is taken"),
    ],
)
def test_an_interpreter_comes_with_the_model(path: str, message: str | None) -> None:
    files = {**PYTHON, "env.tar.gz": 1}
    if message is None:
        assert judged(PYTHON_CONFIG + ENV % path, files)
    else:
        with pytest.raises(InvalidModel, match=message):
            judged(PYTHON_CONFIG + ENV % path, files)
