"""The documents of external metrics: what is found, what is refused, and that no namespace sees another's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from scaler.core.models_view import Averages
from scaler.export.external_metrics import METRICS, ExternalMetrics, quantity
from tests.fakes.models_view import FakeModels

ROOT = "/apis/external.metrics.k8s.io/v1beta1"
Json = dict[str, Any]
Client = TestClient[web.Request, web.Application]


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


@pytest_asyncio.fixture
async def client(models: FakeModels) -> AsyncIterator[Client]:
    api = ExternalMetrics(models, now=lambda: datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC))
    async with TestClient(
        TestServer(api.application(lambda request: request.headers.get("Refuse")))
    ) as client:
        yield client


async def get(client: Client, path: str, **params: str) -> Json:
    async with client.get(path, params=params) as response:
        told: Json = await response.json()
        assert response.status == told.get("code", 200)
        return told


async def values(client: Client, namespace: str, metric: str, selector: str = "") -> dict[str, str]:
    told = await get(client, f"{ROOT}/namespaces/{namespace}/{metric}", labelSelector=selector)
    return {item["metricLabels"]["model"]: item["value"] for item in told["items"]}


async def test_discovery_names_every_metric(client: Client) -> None:
    assert (await get(client, "/apis"))["groups"][0]["name"] == "external.metrics.k8s.io"
    assert (await get(client, "/apis/external.metrics.k8s.io"))["preferredVersion"]["version"] == "v1beta1"
    resources = (await get(client, ROOT))["resources"]
    assert [one["name"] for one in resources] == list(METRICS)
    assert all(one["namespaced"] for one in resources)


async def test_a_value_is_written_as_the_autoscaler_reads_it(client: Client, models: FakeModels) -> None:
    models.add("a/m", concurrency=Averages(3.25, 0.0))
    told = await get(client, f"{ROOT}/namespaces/a/berth-concurrency", labelSelector="model=m")
    assert told == {
        "kind": "ExternalMetricValueList",
        "apiVersion": "external.metrics.k8s.io/v1beta1",
        "metadata": {},
        "items": [
            {
                "metricName": "berth-concurrency",
                "metricLabels": {"model": "m"},
                "timestamp": "2025-01-02T03:04:05Z",
                "value": "3250m",
                "window": 60,
            }
        ],
    }


async def test_what_is_desired_is_of_no_window(client: Client, models: FakeModels) -> None:
    models.add("a/m", desired=2)
    told = await get(client, f"{ROOT}/namespaces/a/berth-desired")
    assert [one.keys() >= {"window"} for one in told["items"]] == [False]


async def test_a_model_that_goes_meanwhile_is_not_among_them(
    client: Client, models: FakeModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.add("a/m", desired=2)
    monkeypatch.setattr(models, "names", lambda namespace: ["m", "gone"])
    assert await values(client, "a", "berth-desired") == {"m": "2"}


async def test_a_selector_chooses_among_the_namespaces_own_models(client: Client, models: FakeModels) -> None:
    for number, name in enumerate(("a/m", "a/n", "b/m", "b/o")):
        models.add(name, requests_per_second=Averages(float(number), 0.0), desired=number + 1)
    assert await values(client, "a", "berth-rps", "model=n") == {"n": "1"}
    assert await values(client, "a", "berth-rps", "model in (m, o)") == {"m": "0"}
    assert await values(client, "a", "berth-rps", "model!=m") == {"n": "1"}
    assert await values(client, "a", "berth-rps", "model=o") == {}
    assert await values(client, "a", "berth-rps") == {"m": "0", "n": "1"}
    assert await values(client, "b", "berth-desired") == {"m": "3", "o": "4"}
    assert await values(client, "c", "berth-desired") == {}


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/namespaces/b%2f..%2fa/berth-rps",
            "/namespaces/b/%2e%2e/a/berth-rps",
            "/namespaces/b/../a/berth-rps",
        ),
        *("/namespaces/a%00/berth-rps", "/namespaces/%61/berth-rps", "/namespaces//a/berth-rps"),
        *("/namespaces/a/berth-rps/", "/namespaces/a", "/berth-rps", "/namespaces/*/berth-rps"),
        *("/namespaces/A/berth-rps", "/namespaces/a/berth-rps/m", "/namespaces/a/berth%2drps"),
    ],
)
async def test_a_path_is_read_as_the_api_server_reads_it_or_not_at_all(
    client: Client, models: FakeModels, path: str
) -> None:
    """RBAC was asked about `namespaces/b`: nothing of `a` may come of it."""
    models.add("a/m")
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(f"GET {ROOT}{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.split()[1] in {b"404", b"400"}, answer
    assert b'"m"' not in answer


@pytest.mark.parametrize(
    ("change", "path", "params", "code", "word"),
    [
        (None, "namespaces/a/berth-cpu", {}, 404, "berth-concurrency"),
        (None, "namespaces/a/berth-rps", {"labelSelector": "model in ("}, 400, "labelSelector"),
        (None, "namespaces/a/berth-rps", {"labelSelector": "x" * 5000}, 400, "labelSelector"),
        (None, "namespaces/a/berth-rps", {"labelSelector": "model in (\x1b[2J\n)"}, 400, "labelSelector"),
        ("leads", "namespaces/a/berth-rps", {}, 503, "lead"),
        ("unknown", "namespaces/a/berth-rps", {}, 503, "a/n"),
    ],
)
async def test_refusals_are_a_status_with_its_reason(
    client: Client, models: FakeModels, change: str | None, path: str, params: dict[str, str], code: int, word: str
) -> None:  # fmt: skip
    models.add("a/m")
    models.add("a/n", requests_per_second=Averages() if change == "unknown" else Averages(1.0, 1.0))
    models.leads = change != "leads"
    told = await get(client, f"{ROOT}/{path}", **params)
    assert (told["kind"], told["status"], told["code"]) == ("Status", "Failure", code)
    assert word in told["message"]
    assert told["message"].isprintable()


@pytest.mark.parametrize("path", ["/apis", ROOT, f"{ROOT}/namespaces/a/berth-rps", "/elsewhere"])
async def test_who_is_not_let_in_learns_nothing(client: Client, models: FakeModels, path: str) -> None:
    models.add("a/m")
    async with client.get(path, headers={"Refuse": "nobody", "X-Remote-User": "system:admin"}) as response:
        assert response.status == 401
        assert (await response.json())["message"] == "nobody"


async def test_nothing_can_be_written(client: Client) -> None:
    calls: list[Callable[..., Any]] = [client.post, client.put, client.patch, client.delete]
    for call in calls:
        async with call(f"{ROOT}/namespaces/a/berth-rps", data=b"{}") as response:
            assert response.status == 405
            assert (await response.json())["kind"] == "Status"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *((0.0, "0"), (1.0, "1"), (0.0001, "1m"), (1.5, "1500m"), (2.0004, "2001m"), (12000.0, "12000")),
        (1e300, str(2**53)),
    ],
)
def test_quantities(value: float, written: str) -> None:
    assert quantity(value) == written
