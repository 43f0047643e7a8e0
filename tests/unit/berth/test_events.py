"""Events on pods: what is written, how often, and what is lost."""

import asyncio
import logging
from datetime import UTC, datetime

import pytest

import berth.kube.events
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.kube.errors import KubeUnreachable
from berth.kube.events import EventRecorder
from tests.fakes.kube import RecordingClient

POD = PodRef("team", "resnet", PodUid("u1"))
EVENTS = "/api/v1/namespaces/team/events"


@pytest.fixture
def api() -> RecordingClient:
    return RecordingClient()


def recorder(api: RecordingClient, *, host: str = "") -> EventRecorder:
    return EventRecorder(
        api,  # type: ignore[arg-type]
        component="berth-binder",
        host=host,
        now=lambda: datetime(2026, 1, 2, 3, 4, 5, 678, UTC),
    )


async def test_an_event_says_who_said_what_of_which_pod(api: RecordingClient) -> None:
    events = recorder(api, host="node-1")
    events.record(POD, "Warning", "Unschedulable", "no GPU")
    await events.flush()
    assert api.written == [
        (
            "create",
            EVENTS,
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": "resnet.", "namespace": "team"},
                "involvedObject": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "namespace": "team",
                    "name": "resnet",
                    "uid": "u1",
                },
                "type": "Warning",
                "reason": "Unschedulable",
                "message": "no GPU",
                "source": {"component": "berth-binder", "host": "node-1"},
                "firstTimestamp": "2026-01-02T03:04:05Z",
                "lastTimestamp": "2026-01-02T03:04:05Z",
                "count": 1,
            },
        )
    ]


async def test_what_belongs_to_no_node_names_none(api: RecordingClient) -> None:
    events = recorder(api)
    events.record(POD, "Normal", "Bound", "x")
    await events.flush()
    assert api.written[0][2]["source"] == {"component": "berth-binder"}


async def test_the_same_again_raises_the_count_and_something_else_is_new(api: RecordingClient) -> None:
    events = recorder(api)
    for message in ("a", "a", "a", "b"):
        events.record(POD, "Warning", "Unschedulable", message)
    await events.flush()
    again = {"lastTimestamp": "2026-01-02T03:04:05Z"}
    assert api.written[1:3] == [
        ("patch", f"{EVENTS}/resnet.1", {"count": 2, **again}),
        ("patch", f"{EVENTS}/resnet.1", {"count": 3, **again}),
    ]
    assert [(verb, body.get("message")) for verb, _, body in api.written[3:]] == [("create", "b")]


async def test_an_event_that_has_expired_is_written_anew(api: RecordingClient) -> None:
    events = recorder(api)
    events.record(POD, "Warning", "R", "a")
    await events.flush()
    api.missing.add(f"{EVENTS}/resnet.1")
    for _ in range(2):
        events.record(POD, "Warning", "R", "a")
    await events.flush()
    assert [(verb, body["count"]) for verb, _, body in api.written[1:]] == [("create", 1), ("patch", 2)]


async def test_a_long_text_is_cut_to_what_the_api_server_takes(api: RecordingClient) -> None:
    events = recorder(api)
    events.record(PodRef("team", "n" * 253, PodUid("u")), "Warning", "R", "x" * 5000)
    await events.flush()
    body = api.written[0][2]
    assert 500 < len(body["message"]) <= 1024
    # A name of at most 253 characters, five of which the API server makes.
    assert 100 < len(body["metadata"]["generateName"]) <= 248


async def test_what_was_said_longest_ago_is_forgotten_first(
    api: RecordingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(berth.kube.events, "_REMEMBERED", 2)
    events = recorder(api)
    for message in ("a", "b", "a", "c", "a", "b"):
        events.record(POD, "Warning", "R", message)
    await events.flush()
    assert [verb for verb, _, _ in api.written] == ["create", "create", "patch", "create", "patch", "create"]


async def test_a_crowd_is_remembered_and_a_memory_is_bounded() -> None:
    assert 1000 <= berth.kube.events._REMEMBERED <= 100_000


async def test_an_api_server_that_is_away_loses_an_event_and_says_so(
    api: RecordingClient, caplog: pytest.LogCaptureFixture
) -> None:
    events = recorder(api)
    api.broken = KubeUnreachable("away")
    events.record(POD, "Warning", "R", "a")
    await events.flush()
    assert [record.getMessage() for record in caplog.records] == ["event lost"]
    api.broken = None
    events.record(POD, "Warning", "R", "a")
    await events.flush()
    assert len(api.written) == 1


async def test_more_than_a_burst_is_lost_and_said_but_never_waited_for(
    api: RecordingClient, caplog: pytest.LogCaptureFixture
) -> None:
    events = recorder(api)
    for count in range(1000):  # a burst that a crowd of one owner may cause
        events.record(POD, "Warning", "R", str(count))
    assert caplog.records == []
    for count in range(100_000):
        events.record(POD, "Warning", "R", str(count))
        if caplog.records:
            break
    assert caplog.records[0].getMessage() == "event lost: queue full"
    assert caplog.records[0].levelno == logging.WARNING
    await events.flush()
    assert len(api.written) >= 1000


async def test_one_pods_slow_event_holds_up_few_others_and_its_own_stay_in_order(
    api: RecordingClient,
) -> None:
    events = recorder(api)
    api.block("slow")
    events.record(PodRef("team", "slow", PodUid("s")), "Normal", "R", "x")
    others = [PodRef("team", f"p{n}", PodUid(f"u{n}")) for n in range(64)]
    for message in ("1", "2"):
        for pod in others:
            events.record(pod, "Normal", "R", message)
    running = asyncio.create_task(events.run())
    for _ in range(2000):
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert api.waiting == 1
    told: dict[str, list[str]] = {}
    for _, _, body in api.written:
        told.setdefault(body["involvedObject"]["name"], []).append(body["message"])
    assert 32 < len(told) < 64
    assert all(messages == ["1", "2"] for messages in told.values())


async def test_what_is_being_written_at_the_end_is_written(api: RecordingClient) -> None:
    events, create, go_on = recorder(api), api.create, asyncio.Event()

    async def slowly(*args: object, **more: object) -> object:
        await go_on.wait()
        return await create(*args, **more)  # type: ignore[arg-type]

    api.create = slowly  # type: ignore[method-assign, assignment]
    events.record(POD, "Normal", "Last", "words")
    running = asyncio.ensure_future(events.run())
    await asyncio.sleep(0.01)
    flush = asyncio.ensure_future(events.flush())
    await asyncio.sleep(0.01)
    assert not flush.done()
    go_on.set()
    await flush
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(api.written) == 1


async def test_an_answer_without_a_name_loses_no_later_event(api: RecordingClient) -> None:
    async def nameless(path: str, body: object) -> dict[str, object]:
        api.written.append(("create", path, body))  # type: ignore[arg-type]
        return {}

    api.create = nameless  # type: ignore[method-assign, assignment]
    events = recorder(api)
    for _ in range(2):
        events.record(POD, "Warning", "Unschedulable", "no GPU")
        await events.flush()
    assert [verb for verb, _, _ in api.written] == ["create", "create"]
