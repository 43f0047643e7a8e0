"""The node's annotation that ends a quarantine."""

from typing import cast

import pytest

from agent.quarantine_annotation import QuarantineAnnotation
from agent.serving.crash_recorder import CrashRecorder
from berth.contract.ids import NodeName
from berth.kube.client import KubeClient
from tests.fakes.kube import RecordingClient

KEY = "seldon.io/trtis-lift-quarantine"


class Crashes:
    """Understands all but `understands` is False of."""

    def __init__(self, *, understands: bool) -> None:
        self.understands = understands
        self.asked: list[str] = []

    async def lift(self, request: str) -> bool:
        self.asked.append(request)
        return self.understands


@pytest.mark.parametrize(
    ("annotations", "understands", "asked", "is_taken"),
    [
        (None, True, [], False),
        ({"other": "x"}, True, [], False),
        ({KEY: "abc"}, False, ["abc"], False),  # stays, so that its author sees it
        ({KEY: "0123456789ab"}, True, ["0123456789ab"], True),
    ],
)
async def test_a_command_is_taken_away_once_it_is_done(
    annotations: dict[str, str] | None, understands: bool, asked: list[str], is_taken: bool
) -> None:
    client, crashes = RecordingClient(), Crashes(understands=understands)
    annotation = QuarantineAnnotation(
        cast(KubeClient, client), node=NodeName("n1"), key=KEY, crashes=cast(CrashRecorder, crashes)
    )
    await annotation.take({"metadata": {"resourceVersion": "7", "annotations": annotations}})
    assert crashes.asked == asked
    # With the version: a command that was written meanwhile is another one.
    done = ("patch", "/api/v1/nodes/n1", {"metadata": {"resourceVersion": "7", "annotations": {KEY: None}}})
    assert client.written == ([done] if is_taken else [])
