"""`/stat` of one model."""

import json
import socket

import pytest

from proxy.request.load import LoadReport, encode_stat
from proxy.stat import stat_reply

LOAD = LoadReport(2.5, 7.0, 3.0, 1700000000.9)


@pytest.mark.parametrize("accept", ["", "*/*", "application/json"])
def test_json_unless_knative_asks(accept: str) -> None:
    reply = stat_reply(LOAD, accept)
    assert reply.content_type == "application/json; charset=utf-8"
    assert json.loads(reply.body) == {
        "podName": socket.gethostname(),
        "averageConcurrentRequests": 2.5,
        "requestCount": 7.0,
        "processUptime": 3.0,
        "timestamp": 1700000000,
    }


def test_protobuf_where_knative_asks() -> None:
    reply = stat_reply(LOAD, "application/protobuf, */*;q=0.1")
    assert reply.content_type == "application/protobuf"
    assert reply.body == encode_stat(LOAD, pod_name=socket.gethostname())
