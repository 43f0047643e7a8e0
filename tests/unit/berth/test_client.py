"""Requests to the API server."""

import asyncio
import io
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from berth.kube import client as module
from berth.kube.client import (
    PATIENCE_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    STRATEGIC_PATCH,
    WRITE_SECONDS,
    KubeClient,
    load_configuration,
    open_client,
    require_reachable,
)
from berth.kube.errors import (
    Conflict,
    Denied,
    Gone,
    Invalid,
    KubeError,
    KubeUnreachable,
    NotFound,
    response_error,
)
from berth.runtime.errors import CannotStart, ConfigError
from localcluster.credentials import write_kubeconfig
from tests.fakes import leaping
from tests.fakes.kube import connected
from tests.fakes.web import serving


class Api:
    """Answers every request with `answer` and `status`; notes what it was asked."""

    def __init__(self, answer: Any = None, *, status: int = 200) -> None:
        text = answer if isinstance(answer, (str, bytes)) else json.dumps(answer or {})
        self.text = text if isinstance(text, bytes) else text.encode()
        self.status = status
        self.method = self.path = self.body = ""
        self.query: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.requests = 0
        self.hangs = False

    async def handle(self, request: web.Request) -> web.Response:
        self.requests += 1
        self.method, self.path, self.query = request.method, request.path, dict(request.query)
        self.headers, self.body = dict(request.headers), await request.text()
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(body=io.BytesIO(self.text), status=self.status)


def kubeconfig(path: Path, server: str, **user: str) -> str:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return str(path)


async def test_reading() -> None:
    api = Api({"kind": "PodList"})
    async with connected(api.handle) as client:
        assert await client.get("/api/v1/pods", limit="5") == {"kind": "PodList"}
    assert (api.method, api.path, api.query, api.body) == ("GET", "/api/v1/pods", {"limit": "5"}, "")
    assert (api.headers["Accept"], api.headers["User-Agent"]) == ("application/json", "berth")
    assert "Authorization" not in api.headers


@pytest.mark.parametrize(
    ("call", "method", "content", "body"),
    [
        (lambda c: c.create("/p", {"a": 1}, dryRun="All"), "POST", "application/json", {"a": 1}),
        (lambda c: c.replace("/p", {"a": 1}), "PUT", "application/json", {"a": 1}),
        (lambda c: c.patch("/p", {"a": None}), "PATCH", "application/merge-patch+json", {"a": None}),
        (
            lambda c: c.patch("/p", {}, content_type=STRATEGIC_PATCH),
            "PATCH",
            "application/strategic-merge-patch+json",
            {},
        ),
        (
            lambda c: c.apply("/p", {"a": 1}, manager="m", dryRun="All"),
            "PATCH",
            "application/apply-patch+yaml",
            {"a": 1},
        ),
        (
            lambda c: c.delete("/p"),
            "DELETE",
            "application/json",
            {"apiVersion": "v1", "kind": "DeleteOptions"},
        ),
        (
            lambda c: c.delete("/p", grace_seconds=0, uid="u1"),
            "DELETE",
            "application/json",
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": "u1"},
            },
        ),
    ],
)
async def test_writing(call: Any, method: str, content: str, body: dict[str, Any]) -> None:
    api = Api({"metadata": {"uid": "u"}}, status=201)
    async with connected(api.handle) as client:
        assert await call(client) == {"metadata": {"uid": "u"}}
    assert (api.method, api.path, json.loads(api.body)) == (method, "/p", body)
    assert api.headers["Content-Type"] == content
    query = {key: value for key, value in api.query.items() if key != "timeout"}
    if content == "application/apply-patch+yaml":
        assert query == {"fieldManager": "m", "force": "true", "dryRun": "All"}
    else:
        assert query == ({"dryRun": "All"} if method == "POST" else {})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Invalid),
        (401, Denied),
        (403, Denied),
        (404, NotFound),
        (409, Conflict),
        (410, Gone),
        (422, Invalid),
    ],
)
async def test_a_refusal_is_known_by_its_status(status: int, kind: type[KubeError]) -> None:
    async with connected(Api({"reason": "Why", "message": "because"}, status=status).handle) as client:
        with pytest.raises(kind, match=f"^{status} Why: because$") as caught:
            await client.get("/p")
        assert (type(caught.value), caught.value.status, caught.value.reason) == (kind, status, "Why")


async def test_a_refusal_names_the_budget_that_is_in_the_way() -> None:
    """node D8: as the API server answers an eviction; what is odd in its details is left out."""
    budget = {"reason": "DisruptionBudget", "message": "The disruption budget web needs 1 healthy pods"}
    for causes, said in (
        ([budget], "429 TooManyRequests: Cannot evict pod. The disruption budget web needs 1 healthy pods"),
        ([{"reason": "FieldValueInvalid", "message": "x"}, 7], "429 TooManyRequests: Cannot evict pod."),
        ("odd", "429 TooManyRequests: Cannot evict pod."),
    ):
        answer = {
            "reason": "TooManyRequests",
            "message": "Cannot evict pod.",
            "details": {"causes": causes, "retryAfterSeconds": 10},
        }
        async with connected(Api(answer, status=429).handle) as client:
            with pytest.raises(KubeError) as caught:
                await client.create("/p", {})
            assert str(caught.value) == said


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (" proxy: no upstream\n", "502: proxy: no upstream"),
        ([1], r"502: \[1\]"),
        ("x" * 10_000, "502: x{1000,5000}$"),
        (b"\xff!", "502: \N{REPLACEMENT CHARACTER}!"),
    ],
)
async def test_an_error_that_no_api_server_wrote_is_reported_as_it_is(answer: Any, message: str) -> None:
    async with connected(Api(answer, status=502).handle) as client:
        with pytest.raises(KubeError, match=f"^{message}"):
            await client.get("/p")


@pytest.mark.parametrize("answer", ["[]", "nonsense", ""])
async def test_an_answer_that_is_no_object_is_no_answer(answer: str) -> None:
    async with connected(Api(answer or " ").handle) as client:
        with pytest.raises(KubeUnreachable, match="unreadable answer"):
            await client.get("/p")


async def test_an_api_server_that_is_away_is_reported_with_the_kind_of_failure() -> None:
    async with connected(Api().handle) as client:
        pass
    with pytest.raises(KubeUnreachable, match=r"^\w+Error") as caught:
        async with aiohttp.ClientSession() as session:
            configuration = Configuration()
            configuration.host = client.host
            await KubeClient(configuration, session).get("/p")
    assert caught.value.status is None
    assert not str(caught.value).endswith((":", " "))


async def test_a_watch_gives_object_after_object_and_tells_what_went_wrong() -> None:
    api = Api('{"n":1}\n{"n":2}\n')
    async with connected(api.handle) as client:
        stream = client.stream("/p", {"watch": "true"}, idle_timeout_seconds=5)
        assert [event async for event in stream] == [{"n": 1}, {"n": 2}]
        assert api.query == {"watch": "true"}
        api.status = 400
        with pytest.raises(Invalid):
            await anext(client.stream("/p", {}, idle_timeout_seconds=5))


async def test_a_client_from_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"data": "x" * 1_500_000}  # the API server's own limit for one object
    api = Api(json.dumps(large) + "\n")
    async with serving(api.handle) as url:
        path = kubeconfig(tmp_path / "config", url, token="secret")
        async with open_client(path) as client:
            assert client.host == url
            assert await client.get("/p") == large
            assert api.headers["Authorization"] == "Bearer secret"
            stream = client.stream("/p", {}, idle_timeout_seconds=5)
            assert [event async for event in stream] == [large]
            assert api.headers["Authorization"] == "Bearer secret"
        monkeypatch.setenv("KUBECONFIG", path)
        assert (await load_configuration(None)).host == url
        other = kubeconfig(tmp_path / "other", "http://other")
        assert (await load_configuration(other)).host == "http://other"


async def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"empty": "", "list": "[]", "half": "clusters: [{}]", "odd": "a: [", "s": "x"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"--kubeconfig: {tmp_path}/{name}: ."):
            await load_configuration(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--kubeconfig: .*absent"):
        await load_configuration(str(tmp_path / "absent"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(CannotStart, match=r"not in a pod \(.*\) and neither --kubeconfig nor KUBECONFIG"):
        await load_configuration(None)


async def test_certificates_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("none")
    path = kubeconfig(tmp_path / "config", "https://127.0.0.1:1")
    config = yaml.safe_load(Path(path).read_text())
    config["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "ca.crt")
    Path(path).write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="--kubeconfig: certificates cannot be read"):
        async with open_client(path):
            pass


def test_a_request_without_an_answer_ends_and_so_does_a_silent_watch(tmp_path: Path) -> None:
    async def story() -> None:
        api = Api()
        api.hangs = True
        async with (
            serving(api.handle) as url,
            open_client(kubeconfig(tmp_path / "config", url)) as client,
        ):
            for call, least, most in (
                (client.get("/p"), 5, 30),
                (client.create("/p", {}), 5, 30),
                (anext(client.stream("/p", {}, idle_timeout_seconds=100)), 99, 110),
            ):
                begun = leaping.now()
                with pytest.raises(KubeUnreachable, match="Timeout"):
                    await call
                assert least < leaping.now() - begun < most

    leaping.run(story(), grace_seconds=0.05)


def test_a_crowd_of_slow_requests_does_not_hold_up_one_more(tmp_path: Path) -> None:
    """Whoever renews a Lease must not wait behind its own writes."""

    async def story() -> None:
        api = Api()
        api.hangs = True
        async with serving(api.handle) as url, open_client(kubeconfig(tmp_path / "c", url)) as client:
            crowd = [asyncio.create_task(client.get("/p")) for _ in range(110)]
            while api.requests < len(crowd):
                await asyncio.sleep(0.01)
            api.hangs = False
            assert await client.get("/lease") == {}
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 20))


async def test_what_a_process_cannot_do_without_is_requested_first() -> None:
    api = Api({"kind": "Node"})
    async with connected(api.handle) as client:
        found = await require_reachable(client, what_for="the node", path="/n", limit="1")
        assert found == {"kind": "Node"}
        assert (api.path, api.query) == ("/n", {"limit": "1"})


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_an_api_server_that_refuses_is_not_asked_again(status: int) -> None:
    api = Api(status=status)
    async with connected(api.handle) as client:
        with pytest.raises(CannotStart, match=f"the node: API server {client.host}: {status}"):
            await require_reachable(client, what_for="the node", path="/n")
    assert api.requests == 1


class Passing(KubeClient):
    """Fails so many times, and then answers. `at`: when it was asked."""

    host = "http://api"

    def __init__(self, error: KubeError, times: int) -> None:
        self.error, self.times, self.at = error, times, list[float]()

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        self.at.append(time.monotonic())
        if len(self.at) <= self.times:
            raise self.error
        return {"kind": "Node"}


@pytest.mark.parametrize(
    "error",
    [KubeUnreachable("refused"), *(response_error(status, "", "later") for status in (429, 500, 503))],
    ids=str,
)
async def test_an_api_server_that_cannot_answer_now_is_asked_again_after_growing_pauses(
    error: KubeError,
) -> None:
    client = Passing(error, 3)
    assert await require_reachable(client, what_for="the node", path="/n") == {"kind": "Node"}
    pauses = [after - before for before, after in pairwise(client.at)]
    assert [round(pause, 1) >= least for pause, least in zip(pauses, (0.2, 0.4, 0.7), strict=True)] == [
        True
    ] * 3


async def test_an_api_server_that_stays_away_is_retried_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an answer that never comes it is over before a startup probe gives up."""
    assert PATIENCE_SECONDS + 2 * REQUEST_TIMEOUT_SECONDS < 120
    monkeypatch.setattr("berth.kube.client.PATIENCE_SECONDS", 0.3)
    client = Passing(KubeUnreachable("refused"), 99)
    with pytest.raises(CannotStart, match="the node: API server http://api: refused"):
        await require_reachable(client, what_for="the node", path="/n")
    assert len(client.at) == 3


class Server:
    """Notes what each request asks for, and answers when it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, dict(request.query)))
        await self.answers.wait()
        return web.json_response({})


async def test_the_api_server_learns_how_long_a_write_may_take() -> None:
    server = Server()
    async with connected(server.handle) as client:
        await client.create("/a", {}, fieldManager="x")
        await client.replace("/a", {})
        await client.patch("/a", {})
        await client.apply("/a", {}, manager="m")
        await client.delete("/a")
        await client.get("/a", limit="1")
    limits = [float(query.get("timeout", "0s").removesuffix("s")) for _, query in server.asked]
    assert all(0 < limit < WRITE_SECONDS for limit in limits[:5])
    assert server.asked[0][1]["fieldManager"] == "x"
    assert server.asked[5] == ("GET", {"limit": "1"})


async def test_a_write_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._WRITE_TIMEOUT.total == WRITE_SECONDS
    monkeypatch.setattr(module, "_WRITE_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    server = Server()
    server.answers.clear()
    async with connected(server.handle) as client:
        with pytest.raises(KubeUnreachable, match="Timeout"):
            await client.create("/a", {})


@pytest.mark.parametrize("names", ["config", "config:other"])
async def test_a_kubeconfig_that_is_not_there_is_said_to_be_missing(tmp_path: Path, names: str) -> None:
    path = ":".join(str(tmp_path / name) for name in names.split(":"))
    with pytest.raises(ConfigError, match=f"^--kubeconfig: {path}: no such file$"):
        await load_configuration(path)


async def test_of_several_kubeconfigs_one_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ca").touch()
    write_kubeconfig(
        tmp_path / "config", server="https://127.0.0.1:1", certificate=tmp_path / "ca", token="t"
    )
    configuration = await load_configuration(f"{tmp_path}/none:~/config")
    assert configuration.host == "https://127.0.0.1:1"
