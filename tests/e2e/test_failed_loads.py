"""A model that Triton cannot load: its reason reaches the pod, and nothing stays on the node."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from localcluster.parts import Part
from localcluster.samples import SIMPLE_MODEL, model_deployment, model_pod, packed
from tests.e2e.support import KEYS, User, berth
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONFIG = (SIMPLE_MODEL / "config.pbtxt").read_bytes()
MODEL = (SIMPLE_MODEL / "1" / "model.py").read_bytes()


BROKEN = {
    "raises": (
        {
            "config.pbtxt": CONFIG,
            "1/model.py": MODEL
            + b"\n    def initialize(self, args):\n        raise RuntimeError('no weights here')\n",
        },
        "no weights here",
    ),
    "syntax": ({"config.pbtxt": CONFIG, "1/model.py": b"def ("}, "SyntaxError"),
    "config": (
        {"config.pbtxt": b'backend: "python"\nmax_batch_size: many\n', "1/model.py": MODEL},
        "config.pbtxt",
    ),
    "backend": (
        {"config.pbtxt": CONFIG.replace(b'"python"', b'"tensorflow9"'), "1/model.py": MODEL},
        "tensorflow9",
    ),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
async def test_the_reason_is_on_the_pod_and_nothing_is_left(
    user: User, url: Callable[[str, bytes], str], kind: str
) -> None:
    files, reason = BROKEN[kind]
    source = url(f"{kind}.tar.gz", packed(**files))
    pod = model_pod(f"broken-{kind}", source=source, gpu_mem="1Gi", pod_spec={"restartPolicy": "Never"})
    await user.apply(pod)

    async def failed() -> dict[str, object]:
        found = await user.pod(f"broken-{kind}")
        assert found["status"]["phase"] == "Failed", found["status"]
        return found

    found = await eventually(failed)
    (status,) = found["status"]["initContainerStatuses"]  # type: ignore[index]
    assert status["state"]["terminated"]["exitCode"] == 1
    assert reason in status["state"]["terminated"]["message"]
    assert reason in await user.event(found, "ModelLoadFailed")
    node = found["spec"]["nodeName"]  # type: ignore[index]

    async def released() -> None:
        assert await user.models_on(node) == {}

    await eventually(released)
    assert user.repository(node) == []


async def test_a_download_that_is_not_there_says_so(user: User, url: Callable[[str, bytes], str]) -> None:
    missing = url("x", b"").removesuffix("x") + "missing.tar.gz"
    pod = model_pod("lost", source=missing, gpu_mem="1Gi", pod_spec={"restartPolicy": "Never"})
    await user.apply(pod)

    async def failed() -> str:
        (status,) = (await user.pod("lost"))["status"]["initContainerStatuses"]
        return str(status["state"]["terminated"]["message"])

    async def said() -> None:
        message = ""
        try:
            message = await failed()
        except KeyError as error:
            raise AssertionError("not ended yet") from error
        assert "404" in message

    await eventually(said)


async def test_a_failed_model_is_tried_again_and_serves_once_it_is_mended(
    user: User, url: Callable[[str, bytes], str]
) -> None:
    source = url("mended.tar.gz", packed(**{"config.pbtxt": CONFIG, "1/model.py": b"def ("}))
    await user.apply(model_deployment("mended", source=source, gpu_mem="1Gi"))

    async def waiting() -> None:
        pod = await user.pod_of("mended")
        (status,) = pod["status"].get("initContainerStatuses") or [{}]
        assert status.get("restartCount", 0) >= 1, status

    await eventually(waiting)
    name = (await user.pod_of("mended"))["metadata"]["name"]
    code, out, err = await berth("why", name, f"--kubeconfig={user.cluster.kubeconfig}")
    assert (code, err) == (0, "")
    assert "SyntaxError" in out
    assert "restart" in out
    url("mended.tar.gz", packed(**{"config.pbtxt": CONFIG, "1/model.py": MODEL}))
    await user.ready("mended")


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(KEYS.model_id, "a/b"), (KEYS.requirements, "a,,b"), (KEYS.model_name, "x" * 200)],
)
async def test_a_pod_with_a_wrong_annotation_is_reported(
    user: User, source: str, annotation: str, value: str
) -> None:
    pod = model_pod("wrong", source=source, gpu_mem="1Gi", annotations={annotation: value})
    await user.apply(pod)
    assert annotation in await user.event(await user.pod("wrong"), "FailedScheduling")


@contextmanager
def standing_still(agent: Part) -> Iterator[None]:
    """It mends its report within a moment."""
    pid = agent.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_an_unreadable_node_report_refuses_the_node_until_its_agent_has_mended_it(
    user: User, source: str
) -> None:
    pinned = {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}}
    damaged = {"metadata": {"annotations": {KEYS.report: '{"v":1,"gpus":"all free"}'}}}
    with standing_still(user.cluster.nodes["gpu-1"].agent):
        await user.client.patch("/api/v1/nodes/gpu-1", damaged)
        await user.apply(model_pod("patient", source=source, gpu_mem="1Gi", pod_spec=pinned))
        message = await user.event(await user.pod("patient"), "FailedScheduling")
    assert "1 UnreadableNodeReport (node report." in message
    await user.ready("patient")
