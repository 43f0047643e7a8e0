"""Reports that wait for a scaler: one of each model, in messages that the scaler reads."""

import time
from dataclasses import replace

from berth.contract.activation import Report
from berth.contract.scaling import ModelKey
from berth.v1 import scaler_pb2 as pb
from proxy.activator.report_queue import ReportQueue, merged
from scaler.activation import control_server

REPORT = Report(
    version=1,
    model=ModelKey("a", "m"),
    buffered=3,
    average_buffered=2.0,
    arrived=4,
    forwarded=1,
    buffered_bytes=900,
    oldest_seconds=0.5,
    cold_start=True,
    rest_port=20000,
    grpc_port=20001,
)


def messages(queue: ReportQueue) -> list[pb.ControlRequest]:
    found = []
    while queue:
        found.append(queue.take())
    return found


def test_two_reports_that_were_not_sent_yet_are_one_in_which_nothing_is_lost() -> None:
    later = replace(
        REPORT,
        buffered=0,
        average_buffered=0.5,
        arrived=2,
        forwarded=5,
        cold_start=False,
        version=2,
        rest_port=0,
    )
    assert merged(REPORT, later) == replace(
        later, average_buffered=2.0, arrived=6, forwarded=6, cold_start=True
    )
    assert merged(later, REPORT).average_buffered == 2.0
    assert merged(replace(REPORT, served_ago=1.5), later).served_ago == 1.5
    assert merged(replace(REPORT, served_ago=1.5), replace(later, served_ago=0.5)).served_ago == 0.5


def test_a_model_has_one_report_in_the_queue() -> None:
    queue = ReportQueue()
    queue.add([REPORT, replace(REPORT, version=2)])
    queue.add([replace(REPORT, version=3)])
    (message,) = messages(queue)
    assert [(one.version, one.arrived) for one in message.reports.reports] == [(3, 12)]
    assert queue.take() == pb.ControlRequest(reports=pb.ModelReports())
    queue.add([REPORT])
    queue.clear()
    assert not queue


def test_many_reports_go_in_messages_that_the_scaler_reads() -> None:
    """A tenant may have thousands of models with the longest names there are."""
    queue = ReportQueue()
    version = time.time_ns() // 1000
    for n in range(5000):
        model = ModelKey("a" * 63, f"m{n}".ljust(253, "x"))
        queue.add([replace(REPORT, model=model, version=version, buffered=10**6)])
    sent = messages(queue)
    assert sum(len(one.reports.reports) for one in sent) == 5000
    assert all(len(one.reports.reports) <= control_server._MOST_REPORTS for one in sent)
    assert all(one.ByteSize() < 0.95 * control_server._MESSAGE_BYTES for one in sent)


def test_the_open_ports_of_many_usual_models_go_in_one_message() -> None:
    """Until they are sent the next scaler does not know of them."""
    queue = ReportQueue()
    for n in range(5000):
        model = ModelKey("team-of-people", f"a-usual-name-of-a-model-{n}")
        queue.add([replace(REPORT, model=model, buffered=0, average_buffered=0, arrived=0, forwarded=0)])
    assert len(messages(queue)) == 1
