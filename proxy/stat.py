"""`/stat` of one model: the last second's load, as Knative's Stat if protobuf is requested, else as JSON."""

import json
import socket

from berth.runtime.admin import Reply
from proxy.request.load import LoadReport, encode_stat


def stat_reply(load: LoadReport, accept: str) -> Reply:
    pod = socket.gethostname()
    if "application/protobuf" in accept:
        return Reply(encode_stat(load, pod_name=pod), "application/protobuf")
    said = {
        "podName": pod,
        "averageConcurrentRequests": load.average_concurrency,
        "requestCount": load.requests,
        "processUptime": load.uptime_seconds,
        "timestamp": int(load.timestamp),
    }
    return Reply(json.dumps(said).encode(), "application/json; charset=utf-8")
