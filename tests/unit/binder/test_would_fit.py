"""`berth would-fit`: which files it takes, what it prints, and how it ends."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.kube import paths
from berth.runtime.errors import ConfigError
from tests.fakes.commands import BARE, add_node, call, pod_file, read_by_commands
from tests.fakes.objects import GIB, gpu, pod, report
from tests.fakes.reader import Reader

Json = dict[str, Any]
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Reader:
    return read_by_commands(monkeypatch)


FILES: dict[str, str] = {
    "a pod without a name": BARE,
    "a deployment": f"kind: Deployment\nspec: {{template: {{{BARE}}}}}",
    "between other documents": f"---\n---\nkind: Service\nspec: {{ports: []}}\n---\n{BARE}\n---\n- a list\n",
}
WRONG: dict[str, tuple[str, str]] = {
    "no YAML": ("{", "--filename: .*while parsing"),
    "no pod": ("kind: Service\nspec: {template: {spec: {containers: 1}}}", "0 pods or pod templates found"),
    "template without a spec": ("spec: {template: {metadata: {}}}", "0 pods or pod templates found"),
    "two pods": (f"{BARE}\n---\n{BARE}", "2 pods or pod templates found; write exactly one"),
    "unreadable request": (BARE.replace("3Gi", "1.5"), "the pod cannot be placed: container 'c'"),
}


@pytest.mark.parametrize("case", FILES)
async def test_a_file_that_would_fit(
    case: str, api: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report(), taints=[])
    await call("would-fit", "-f", pod_file(tmp_path, FILES[case]), "-o", "json")
    said = json.loads(capsys.readouterr().out)
    assert (
        said["message"] == "the pod requests 3 GiB and fits on 1 of 1 nodes; the binder places it, if it runs"
    )
    assert said["fits"]
    assert "stage" not in said


async def test_standard_input_and_the_exit_code_of_what_would_not_fit(
    api: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(api, "n1", says=report(gpu(total=2 * GIB)))
    monkeypatch.setattr("sys.stdin", io.StringIO(BARE))
    with pytest.raises(SystemExit) as ended:
        await call("would-fit", "-f", "-")
    assert ended.value.code == 1
    assert "no GPU is large enough: 3 GiB asked, 2 GiB on the largest when empty" in capsys.readouterr().out


@pytest.mark.parametrize(("namespace", "fits"), [("team", True), ("elsewhere", False)])
@pytest.mark.parametrize("in_file", [True, False])
async def test_the_pod_s_namespace_is_the_file_s_or_the_option_s(
    namespace: str, fits: bool, in_file: bool, api: Reader, tmp_path: Path
) -> None:
    """Seen by whose company the pod finds."""
    add_node(api, "n1", says=report())
    friend = pod("friend", mem=None, on="n1")
    friend["metadata"]["labels"] = {"app": "x"}
    api.add(paths.PODS, friend)
    term = "{topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: x}}}"
    rule = f"affinity: {{podAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: [{term}]}}}}"
    text = BARE.replace("{containers", f"{{{rule}, containers")
    if in_file:
        text = f"metadata: {{namespace: {namespace}}}\n{text}"
    argv = ("-f", pod_file(tmp_path, text), "-n", "nobody" if in_file else namespace)
    if fits:
        await call("would-fit", *argv)
    else:
        with pytest.raises(SystemExit):
            await call("would-fit", *argv)


@pytest.mark.parametrize("case", WRONG)
async def test_a_file_that_cannot_be_used(case: str, api: Reader, tmp_path: Path) -> None:
    text, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        await call("would-fit", "-f", pod_file(tmp_path, text))
    with pytest.raises(ConfigError, match="No such file"):
        await call("would-fit", "-f", str(tmp_path / "none"))
