"""Knative's own decider as a program that answers the lines of `berth scaler --replay`, built once from its Go module.

Its code is that of the module but for two words: where the decider and the windows read the wall clock, they read the
time of the line instead. What says whether it is in panic is added.
"""

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any, Final

from bench.builds import go_build, go_run, kept, key_of
from localcluster.building import BuildFailed

_MODULE: Final = Path(__file__).parent / "knativedecider"
_SERVING: Final = "knative.dev/serving"
_CLOCK: Final = (
    'package {}\n\nimport "time"\n\n// Now is the time of the line that is answered.\nvar Now = time.Now\n'
)
_IN_PANIC: Final = "\nfunc InPanic(s UniScaler) bool { return !s.(*autoscaler).panicTime.IsZero() }\n"
# The files that read the wall clock, each in one place, and what their packages get beside.
_PATCHED: Final = {
    "pkg/autoscaler/aggregation/bucketing.go": _CLOCK.format("aggregation"),
    "pkg/autoscaler/scaling/autoscaler.go": _CLOCK.format("scaling") + _IN_PANIC,
}


def oracle() -> Path:
    """The program. Raises BuildFailed."""
    inputs = [_MODULE / name for name in ("go.mod", "go.sum", "main.go")]
    return kept("oracle", key_of(*inputs, Path(__file__)), lambda to: _build(inputs, to))


def _build(inputs: Iterable[Path], target: Path) -> None:
    source = target.with_name("source")
    source.mkdir()
    for file in inputs:
        shutil.copy(file, source)
    # What go.sum has vouched for.
    found = json.loads(go_run("mod", "download", "-json", _SERVING, module=source))
    shutil.copytree(Path(found["Dir"], "pkg"), source / "serving" / "pkg", copy_function=shutil.copyfile)
    shutil.copyfile(Path(found["Dir"], "go.mod"), source / "serving" / "go.mod")
    for directory in (source / "serving").rglob("*"):
        if directory.is_dir():
            directory.chmod(0o755)
    for name, beside in _PATCHED.items():
        _patch(source / "serving" / name, beside)
    go_run("mod", "edit", f"-replace={_SERVING}=./serving", module=source)
    go_build(".", target, source, takes="1 to 5 minutes, once")


def _patch(file: Path, beside: str) -> None:
    text = file.read_text()
    if text.count("time.Now()") != 1:
        raise BuildFailed(f"{file.name} of {_SERVING} reads the clock in another way than was known")
    file.write_text(text.replace("time.Now()", "Now()"))
    file.with_name("zz_clock.go").write_text(beside)


@contextmanager
def asking() -> Iterator["Asked"]:
    """A running oracle."""
    with subprocess.Popen([oracle()], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Asked(process)
        finally:
            process.kill()


class Asked:
    """One oracle and its pipes. Questions are written by a thread, so that neither pipe can block the other."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin
        assert process.stdout
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout

    def answers(self, lines: list[str]) -> list[dict[str, Any]]:
        """One for each line that is not a stat."""
        expected = sum('"op":"stat"' not in line and '"op": "stat"' not in line for line in lines)
        writer = Thread(target=self._write, args=("".join(lines).encode(),))
        writer.start()
        try:
            return [json.loads(self._stdout.readline()) for _ in range(expected)]
        finally:
            writer.join()

    def _write(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()
