"""What a test or a bench builds or installs once, and keeps for the next one."""

import hashlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from localcluster.binaries import go, go_environment
from localcluster.building import BuildFailed, locked, progress, say
from localcluster.paths import cache_directory


def kept(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """What `make` has put there, now or earlier."""
    target = cache_directory() / "clients" / f"{name}-{key}"
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            scratch = Path(tempfile.mkdtemp(dir=target.parent))
            try:
                make(scratch / name)
                (scratch / name).rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def key_of(*files: Path) -> str:
    """Of what decides the result."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def go_build(package: str, target: Path, module: Path, takes: str = "half a minute, once") -> None:
    """Build a package as the module's directory sees it. Raises BuildFailed."""
    say(f"building {target.name} from Go modules: {takes}")
    with progress(time.monotonic()):
        go_run("build", "-trimpath", "-ldflags=-s -w", "-o", str(target), package, module=module)


def go_run(*arguments: str, module: Path) -> str:
    """What `go` says on standard output. Raises BuildFailed."""
    command = [go(), *arguments]
    done = subprocess.run(command, cwd=module, env=go_environment(), capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(f"go {' '.join(arguments)}: {done.stderr[-1000:]}")
    return done.stdout
