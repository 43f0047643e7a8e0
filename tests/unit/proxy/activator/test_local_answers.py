"""What is remembered of a model for as long as it sleeps."""

import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from proxy.activator.local_answers import LastAnswers, model_metadata
from proxy.policy.refusal import NotServed
from proxy.policy.routes import Route
from proxy.upstream.queries import Answer

TOLD: dict[str, Any] = {
    "name": "own",
    "versions": ["1", "3"],
    "platform": "onnx",
    "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 300]}],
    "outputs": [{"name": "OUT", "datatype": "BYTES", "shape": []}],
}


def memory(**told: Any) -> LastAnswers:
    made = LastAnswers("own")
    made.remember("/v2/models/own", Answer(200, json.dumps(TOLD | told).encode()))
    return made


def test_only_an_answer_of_a_usual_size_is_remembered() -> None:
    made = LastAnswers("own")
    made.remember("/v2/models/own", Answer(404, b"{}"))
    made.remember("/v2/models/own", Answer(200, bytes(256 * 1024 + 1)))
    with pytest.raises(NotServed, match="a request for inference starts a replica"):
        made.body(Route.MODEL)
    made.remember("/v2/models/own", Answer(200, b"{}"))
    made.remember("/v2/models/own", Answer(400, b"not now"))
    assert made.body(Route.MODEL) == b"{}"
    with pytest.raises(NotServed):
        made.body(Route.CONFIG)


def test_each_question_has_its_own_answer() -> None:
    made = LastAnswers("own")
    for path in made.paths:
        made.remember(path, Answer(200, path.encode()))
    for other in (None, Route.STATS):
        with pytest.raises(NotServed):
            made.body(other)
    assert made.body(Route.MODEL) == b"/v2/models/own"
    assert made.body(Route.CONFIG) == b"/v2/models/own/config"
    assert made.ready_path == "/v2/models/own/ready"


def test_one_that_has_told_of_no_version_has_one_without_a_name() -> None:
    assert LastAnswers("own").versions() == [""]
    assert memory(versions=[]).versions() == [""]
    assert memory(versions="3").versions() == [""]
    assert memory().versions() == ["1", "3"]


def test_metadata_of_rest_are_those_of_grpc() -> None:
    message = pb.ModelMetadataResponse.FromString(model_metadata(memory().model()))
    assert (message.name, list(message.versions), message.platform) == ("own", ["1", "3"], "onnx")
    assert [(one.name, one.datatype, list(one.shape)) for one in message.inputs] == [
        ("IN", "FP32", [-1, 300])
    ]
    assert [(one.name, one.datatype, list(one.shape)) for one in message.outputs] == [("OUT", "BYTES", [])]


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_object_is_reported_to_none(body: bytes) -> None:
    """A tenant's own image may answer anything."""
    made = LastAnswers("own")
    made.remember("/v2/models/own", Answer(200, body))
    made.remember("/v2", Answer(200, body))
    for ask in (made.model, made.server):
        with pytest.raises(NotServed):
            ask()
    assert made.versions() == [""]


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"name": "own", "inputs": [3]},
        {"name": "own", "inputs": [{"name": "IN"}]},
        {"name": "own", "outputs": 7},
    ],
)
def test_metadata_that_are_none_are_reported_to_none(told: dict[str, Any]) -> None:
    with pytest.raises(NotServed):
        model_metadata(told)
