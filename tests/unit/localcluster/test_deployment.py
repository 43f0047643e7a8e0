"""Flags, mounts, users and probes stand in `deploy/` alone: what the local cluster lays over it, and what it reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec
from localcluster.deployment import DEPLOY, Overlay, base_container, flag_of, node_labels
from localcluster.processes import StartFailed

Json = dict[str, Any]


def base() -> list[Json]:
    paths = [path for path in sorted((DEPLOY / "base").glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def key(document: Json) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def changed(before: list[Json], after: list[Json]) -> dict[tuple[str, str], set[str]]:
    """Which paths of which objects differ."""
    then = {key(document): document for document in before}
    found = {key(new): set(paths_that_differ(then.get(key(new), {}), new)) for new in after}
    return {name: paths for name, paths in found.items() if paths}


def paths_that_differ(old: Any, new: Any, path: str = "") -> list[str]:
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            inner
            for name in sorted({*old, *new})
            for inner in paths_that_differ(old.get(name), new.get(name), f"{path}/{name}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
        old = [*old, *[None] * (len(new) - len(old))]
        pairs = zip(old, new, strict=True)
        return [p for i, (a, b) in enumerate(pairs) for p in paths_that_differ(a, b, f"{path}/{i}")]
    return [path]


def test_nothing_but_mock_gpus_and_the_number_of_binders_differs_from_base() -> None:
    before = base()
    found = changed(before, Overlay({"binder": 1}).over(before))
    agent = base_container("agent")
    nvml, mounts = agent["args"].index("--nvml=nvml"), len(agent["volumeMounts"])
    (pod,) = [d["spec"]["template"]["spec"] for d in before if key(d) == ("DaemonSet", "berth-agent")]
    inside = "/spec/template/spec"
    assert found.pop(("RuntimeClass", "nvidia"))
    assert found == {
        ("Deployment", "berth-binder"): {"/spec/replicas"},
        ("DaemonSet", "berth-agent"): {
            f"{inside}/containers/0/args/{nvml}",
            f"{inside}/containers/0/volumeMounts/{mounts}",
            f"{inside}/volumes/{len(pod['volumes'])}",
        },
    }
    assert base() == before


def test_flags_of_a_test_come_after_those_of_base() -> None:
    after = Overlay({"binder": 1}, {"agent": ["--heartbeat-seconds=2"]}).over(base())
    (pod,) = [d["spec"]["template"]["spec"] for d in after if key(d) == ("DaemonSet", "berth-agent")]
    assert pod["containers"][0]["args"][-1] == "--heartbeat-seconds=2"


def test_nodes_carry_the_labels_that_the_pods_select() -> None:
    assert node_labels(base()) == {"nvidia.com/gpu.present": "true"}


def test_a_flag_that_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="agent has no --no-such in deploy/base"):
        flag_of(base_container("agent"), "--no-such")
    with pytest.raises(LookupError, match="no DaemonSet with a container 'none'"):
        base_container("none")


def test_a_triton_by_itself_has_the_flags_of_base(tmp_path: Path) -> None:
    command = triton.command(
        address="127.20.1.1",
        models=tmp_path / "models",
        backends=tmp_path / "backends",
        keys=TritonKeys("a", "b"),
        shm_prefix="berth-x-",
    )
    (line,) = base_container("triton")["args"]
    for flag in ("--model-control-mode=explicit", "--strict-readiness=false", "--allow-metrics=false"):
        assert flag in line
        assert flag in command
    assert f"--model-repository={tmp_path / 'models'}" in command
    assert {"--http-address=127.20.1.1", "--grpc-address=127.20.1.1"} < set(command)
    assert not [word for word in command if "$" in word or " " in word]


async def test_a_node_whose_sockets_would_have_too_long_paths_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(StartFailed, match=r"gpu-1/host/run/berth/.* set TMPDIR to a shorter directory"):
        async with LocalCluster(ClusterSpec(nodes=[NodeSpec("gpu-1", "gpus: []")])):
            pytest.fail("it started")
    assert list(long.iterdir()) == []
