"""`POST /schedulable` as a port: who may ask, what is refused, and that placing pods goes on meanwhile."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from berth.contract.ids import NodeName, PodUid
from berth.contract.scaling import SchedulableAnswer, SchedulableRequest
from berth.kube.informer import Change, ChangeKind
from binder.api import schedulable as schedulable_api
from binder.api.callers import Callers
from binder.api.leader import LeaderOnly
from binder.api.schedulable import SchedulableApi
from binder.loop.metrics import BinderMetrics
from scaler.schedulable import BinderClient
from tests.fakes.binder import scheduler_of
from tests.fakes.objects import KEYS, gpu, node, pod, report
from tests.fakes.web import serving
from tests.unit.binder.test_callers import TokenReviews
from tests.unit.binder.test_schedulable import model

Json = dict[str, Any]


class Port:
    """A replica that answers, and what it takes of time."""

    def __init__(self, *, leader: str = "") -> None:
        self.api, self.now, self.pauses = TokenReviews(), 0.0, list[float]()
        self.registry = CollectorRegistry()
        metrics = BinderMetrics(self.registry)
        self.scheduler = scheduler_of(
            self.api,
            metrics=metrics,
        )
        self.scheduler.on_node(Change(ChangeKind.SET, node("n1", says=report(gpu("n1-0")))))
        self.scheduler.cluster.decider.table.beat(NodeName("n1"), np.inf)
        self.scheduler.leads = not leader
        self.port = SchedulableApi(
            self.scheduler,
            metrics,
            LeaderOnly(lambda: self.scheduler.leads, lambda: leader),
            Callers(self.api, "berth-system", lambda: self.now),  # type: ignore[arg-type]
            keys=KEYS,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[TestClient[web.Request, web.Application]]:
        async with TestClient(TestServer(self.port.application())) as client:
            yield client


BODY = json.loads(SchedulableRequest(models=(model("a", 5),)).encode())


async def post(port: Port, body: Any = BODY, *, token: str = "good", **more: Any) -> tuple[int, Json]:
    async with port.serving() as client:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = await client.post(
            "/schedulable", data=data, headers=headers | more.pop("headers", {}), **more
        )
        try:
            return answer.status, await answer.json()
        except (aiohttp.ContentTypeError, ValueError):
            return answer.status, {}


async def test_the_scaler_is_answered() -> None:
    port = Port()
    status, answer = await post(port)
    assert status == 200
    (found,) = answer["models"]
    assert (found["model"], found["now"], found["never"]) == ("team/a", 4, 1)
    assert json.loads(SchedulableAnswer.decode(json.dumps(answer).encode()).encode()) == answer
    assert port.api.reviews[0]["spec"] == {"token": "good", "audiences": ["berth-binder"]}
    assert port.registry.get_sample_value("berth_binder_schedulable_seconds_count") == 1


@pytest.mark.parametrize(("token", "status"), [("", 401), ("forged", 401), ("other", 403)])
async def test_no_other_caller_is(token: str, status: int) -> None:
    found, answer = await post(Port(), token=token)
    assert found == status
    assert answer["error"]


async def test_nobody_is_believed_while_the_api_server_cannot_tell() -> None:
    port = Port()
    port.api.fail = True
    status, _ = await post(port)
    assert status == 503
    port.api.fail = False
    assert (await post(port))[0] == 200


def with_model(**changes: Any) -> Json:
    return {"models": [BODY["models"][0] | changes]}


HOSTILE: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b"{",
    "deep": b'{"models":' + b"[" * 100_000,
    "not UTF-8": b'{"models":[{"model":"\xff"}]}',
    "a list": [],
    "no models": {},
    "models of another kind": {"models": {"a": 1}},
    "a model without fields": {"models": [{}]},
    "a name that is none": with_model(model="team"),
    "a name with two slashes": with_model(model="team/a/b"),
    "a negative number": with_model(desired=-1),
    "a number that is huge": with_model(desired=2**64),
    "a fraction": with_model(desired=1.5),
    "NaN": json.dumps(with_model()).replace('"desired": 5', '"desired": NaN').encode(),
    "a template of text": with_model(template="x"),
    "the same twice": {"models": BODY["models"] * 2},
    "idle pods of numbers": {**BODY, "idle": [1]},
    "too many idle pods": {**BODY, "idle": ["a/b"] * 9000},
    "too many models": {
        "models": [BODY["models"][0] | {"model": f"a/m{i}", "template": {}} for i in range(5000)]
    },
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_what_is_no_question_is_one_clear_error(case: str) -> None:
    port = Port()
    status, answer = await post(port, HOSTILE[case])
    assert status == 400, answer
    assert answer["error"]
    assert (await post(port))[0] == 200


async def test_a_body_that_is_too_large_is_refused_packed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulable_api, "_BODY_BYTES", 64 * 1024)
    large = json.dumps({**BODY, "more": "x" * 200_000}).encode()
    assert (await post(Port(), large))[0] == 413
    packed = gzip.compress(large)
    assert (await post(Port(), packed, headers={"Content-Encoding": "gzip"}))[0] in (400, 413)


async def test_a_body_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulable_api, "_BODY_SECONDS", 0.05)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    async with Port().serving() as client:
        answer = await client.post("/schedulable", data=slowly(), headers={"Authorization": "Bearer good"})
        assert answer.status == 408


ODD: list[Json] = [
    {},
    {"spec": None},
    {"spec": {"containers": "x"}},
    {"spec": {"containers": [{"resources": {"limits": {KEYS.gpu_mem: "-1"}}}]}},
    {"metadata": [], "spec": {"containers": []}},
    {"metadata": {"labels": {"a": 1}, "annotations": {KEYS.gpu_count: 1}}, "spec": {"containers": []}},
    {"spec": {"containers": [], "tolerations": [1]}},
    {"spec": {"containers": [], "tolerations": [{"key": ["x"], "operator": "Equal"}]}},
    {"spec": {"containers": [], "nodeSelector": {"a": {"b": "c"}}}},
    {"spec": {"containers": [], "nodeSelector": ["a"]}},
    {
        "spec": {
            "containers": [],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 7}},
        }
    },
    {"spec": {"containers": [], "topologySpreadConstraints": [{"topologyKey": {}, "labelSelector": {}}]}},
    {"spec": {"containers": [], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": {}}}]}},
]


@pytest.mark.parametrize("odd", ODD)
async def test_one_odd_template_spoils_no_other_models_answer(odd: Json) -> None:
    """Also where it breaks only in the midst of a decision."""
    strange = BODY["models"][0] | {"model": "team/odd", "template": odd, "templateHash": "odd", "priority": 9}
    status, answer = await post(Port(), {"models": [strange, *BODY["models"]]})
    assert status == 200
    found = {one["model"]: one for one in answer["models"]}
    assert found["team/a"]["now"] + found["team/odd"]["now"] >= 4
    assert found["team/odd"]["now"] > 0 or found["team/odd"]["reason"]


async def test_a_standby_sends_its_caller_to_the_leader() -> None:
    async with Port(leader="http://10.0.0.7:8482").serving() as client:
        answer = await client.post("/schedulable", data=b"{}", allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (307, "http://10.0.0.7:8482/schedulable")


async def test_an_answer_leaves_most_of_the_time_to_pods_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock takes a millisecond here."""
    port = Port()
    port.scheduler.on_pod(Change(ChangeKind.SET, pod("waits", mem="17Gi")))
    monkeypatch.setattr(port.port, "_clock", lambda: setattr(port, "now", port.now + 0.001) or port.now)
    body = SchedulableRequest(models=tuple(model(f"m{i}", 1, 17) for i in range(50))).encode()
    assert (await post(port, body))[0] == 200
    slices = [pause for pause in port.pauses if pause > 0]
    assert len(slices) > 15
    assert max(slices) < 0.010  # as long as the slice before, and none of them much longer than it should be
    port.pauses.clear()
    assert (await post(port))[0] == 200
    assert port.pauses[0] > 19 * sum(slices) * 0.9
    port.scheduler.queue.remove(PodUid("waits"))
    port.pauses.clear()
    assert (await post(port, body))[0] == 200
    assert len(port.pauses) > 15
    assert set(port.pauses) == {0.0}, "nobody else has anything to do"


async def test_after_an_answer_that_took_long_the_next_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = Port()
    port.scheduler.on_pod(Change(ChangeKind.SET, pod("waits", mem="17Gi")))
    monkeypatch.setattr(port.port, "_clock", lambda: setattr(port, "now", port.now + 0.2) or port.now)
    assert (await post(port))[0] == 200
    port.pauses.clear()
    assert (await post(port))[0] == 200
    assert 4.0 < port.pauses[0] <= 5.0


async def test_a_leader_that_is_none_any_more_gives_no_answer() -> None:
    port = Port()

    port.scheduler.on_pod(Change(ChangeKind.SET, pod("waits", mem="17Gi")))

    async def deposed(seconds: float) -> None:
        port.scheduler.leads = False

    port.port._sleep = deposed
    assert (await post(port))[0] == 503


async def test_only_so_many_wait() -> None:
    port, go = Port(), asyncio.Event()
    port.scheduler.on_pod(Change(ChangeKind.SET, pod("waits", mem="17Gi")))

    async def held(_: float) -> None:
        await go.wait()

    port.port._sleep = held
    async with port.serving() as client:
        headers = {"Authorization": "Bearer good"}
        asked = [
            asyncio.create_task(client.post("/schedulable", json=BODY, headers=headers)) for _ in range(9)
        ]
        while sum(task.done() for task in asked) < 5:
            await asyncio.sleep(0.001)
        go.set()
        found = sorted([answer.status for answer in await asyncio.gather(*asked)])
    assert found == [200] * 4 + [429] * 5


# The client.


class Binders:
    """Replicas on ports of their own."""

    def __init__(self, *handlers: Callable[[web.Request], Any]) -> None:
        self.servers = []
        for handler in handlers:
            app = web.Application()
            app.router.add_post("/schedulable", handler)
            self.servers.append(TestServer(app))

    async def __aenter__(self) -> list[str]:
        for server in self.servers:
            await server.start_server()
        return [f"http://127.0.0.1:{server.port}" for server in self.servers]

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers:
            await server.close()


ANSWER = {
    "generation": 7,
    "models": [{"model": "team/a", "now": 2, "ifIdleGo": ["team/x"], "never": 1, "reason": "why"}],
}
ASKED = SchedulableRequest(models=(model("a", 5),))


async def test_the_client_follows_the_leader_and_asks_it_from_then_on() -> None:
    seen: list[str] = []
    urls: list[str] = []

    async def leads(request: web.Request) -> web.Response:
        seen.append("leader")
        assert request.headers["Authorization"] == "Bearer t"
        assert SchedulableRequest.decode(await request.read()) == ASKED
        return web.json_response(ANSWER)

    async def stands_by(request: web.Request) -> web.Response:
        seen.append("standby")
        return web.Response(status=307, headers={"Location": f"{urls[0]}/schedulable"})

    async with Binders(leads, stands_by) as found, aiohttp.ClientSession() as session:
        urls += found
        client = BinderClient(session, urls[1], lambda: "t\n")
        for _ in range(2):
            answer = await client.ask(ASKED)
            assert answer is not None
            assert json.loads(answer.encode()) == ANSWER
        assert seen == ["standby", "leader", "leader"]


async def test_a_leader_that_has_gone_is_looked_for_anew() -> None:
    urls: list[str] = []
    leads_now = 0

    def replica(number: int) -> Callable[[web.Request], Any]:
        async def answer(_: web.Request) -> web.Response:
            if number == leads_now:
                return web.json_response(ANSWER)
            return web.Response(status=307, headers={"Location": f"{urls[leads_now]}/schedulable"})

        return answer

    binders = Binders(replica(0), replica(1))
    async with binders as found, aiohttp.ClientSession() as session:
        urls += found
        client = BinderClient(session, urls[1], lambda: "t")
        assert await client.ask(ASKED) is not None
        await binders.servers[0].close()
        leads_now = 1
        assert await client.ask(ASKED) is not None
        leads_now = 0
        assert await client.ask(ASKED) is None


def answering(status: int, body: bytes = b"", **headers: str) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    return answer


NO_ANSWERS = {
    "an error": answering(500, b"x" * 100_000),
    "busy": answering(429),
    "no JSON": answering(200, b"<html>"),
    "another JSON": answering(200, b"[]"),
    "a name that is none": answering(200, b'{"generation": 1, "models": [{"model": "a", "now": 1}]}'),
    "a negative number": answering(200, b'{"generation": 1, "models": [{"model": "a/b", "now": -1}]}'),
    "nowhere to go": answering(307),
    "to another path": answering(307, Location="http://127.0.0.1:1/secret"),
    "to another scheme": answering(307, Location="file:///schedulable"),
    "to what is no URL": answering(307, Location="http://[/schedulable"),
    "with a password": answering(307, Location="http://a:b@127.0.0.1:1/schedulable"),
    "in a circle": answering(307, Location="/schedulable"),
}


@pytest.mark.parametrize("case", NO_ANSWERS)
async def test_what_is_no_answer_is_none(case: str) -> None:
    async with Binders(NO_ANSWERS[case]) as (url,), aiohttp.ClientSession() as session:
        client = BinderClient(session, url, lambda: "t")
        assert await client.ask(ASKED) is None


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1:{port}/secret", "https://127.0.0.1:{port}/schedulable", "http://a:b@127.0.0.1:{port}/schedulable"],
)  # fmt: skip
async def test_a_token_is_shown_to_no_other_question(location: str) -> None:
    """Though whoever is there would answer."""
    asked: list[str] = []

    async def answers(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) > 1:
            return web.json_response(ANSWER)
        return web.Response(status=307, headers={"Location": location.format(port=request.url.port)})

    async with serving(answers) as url, aiohttp.ClientSession() as session:
        assert await BinderClient(session, url, lambda: "t").ask(ASKED) is None
    assert asked == ["/schedulable"]


async def test_that_the_binder_is_silent_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "scaler.schedulable")
    answers = iter([500, 429, 200, 200, 500, 500])  # the leader, and then the Service

    async def in_turn(_: web.Request) -> web.Response:
        status = next(answers)
        return web.json_response(ANSWER, status=status)

    async with serving(in_turn) as url, aiohttp.ClientSession() as session:
        client = BinderClient(session, url, lambda: "t")
        found = [await client.ask(ASKED) is not None for _ in range(5)]
    assert found == [False, False, True, True, False]
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO", "WARNING"]


async def test_an_answer_that_does_not_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaler.schedulable._ANSWER_BYTES", 64)
    async with (
        Binders(answering(200, json.dumps(ANSWER).encode())) as (url,),
        aiohttp.ClientSession() as session,
    ):
        assert await BinderClient(session, url, lambda: "t").ask(ASKED) is None


async def test_replicas_that_name_each_other_are_not_followed_for_ever() -> None:
    urls: list[str] = []
    asked = [0]

    async def points(_: web.Request) -> web.Response:
        asked[0] += 1
        return web.Response(status=307, headers={"Location": f"{urls[0]}/schedulable"})

    async with Binders(points) as found, aiohttp.ClientSession() as session:
        urls += found
        assert await BinderClient(session, urls[0], lambda: "t").ask(ASKED) is None
    assert asked[0] == 3


async def test_a_binder_that_never_answers_and_a_token_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("scaler.schedulable.ANSWER_SECONDS", 0.05)

    async def hangs(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    no_token = (tmp_path / "token").read_text

    async with Binders(hangs) as (url,), aiohttp.ClientSession() as session:
        assert await BinderClient(session, url, lambda: "t").ask(ASKED) is None
        caplog.clear()
        assert await BinderClient(session, url, no_token).ask(ASKED) is None
        (line,) = caplog.records
        assert f"--binder-token: {tmp_path}/token: No such file" in str(line.fields)  # type: ignore[attr-defined]
        assert await BinderClient(session, "http://127.0.0.1:1", lambda: "t").ask(ASKED) is None
