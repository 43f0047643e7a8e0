"""`berth scale`: whom it asks, what it shows of what it is told, and what it says where nobody tells anything."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from berth.contract.keys import Keys
from berth.contract.scaling import Scaled
from berth.kube.errors import KubeError, KubeUnreachable, response_error
from berth.kube.times import micro_time, rfc3339
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.runtime.options import parse_options
from scaler import scale
from scaler.core.models_view import Averages, ColdStartView, DecisionView, to_json
from scaler.decision.bounds import Activity
from tests.fakes.models_view import FakeModels
from tests.fakes.web import serving

KEYS = Keys()
Json = dict[str, Any]
LEASE = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases/berth-scaler"
DEPLOYMENT = "/apis/apps/v1/namespaces/a/deployments/resnet"
PROXY = "/api/v1/namespaces/berth-system/pods/berth-scaler-7d-x2:8490/proxy/models/a/resnet"
CLASS = {"autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev"}
SECOND_NS = 1_000_000_000


# At which everybody looks, however long a test takes.
NOW = datetime.now(UTC).replace(microsecond=0)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


class Server:
    """An API server: what is at a path, or what asking for it meets."""

    host = "https://server"

    def __init__(self) -> None:
        self.there: dict[str, Json | KubeError] = {}

    async def get(self, path: str) -> Json:
        found = self.there.get(path, response_error(404, "NotFound", path))
        if isinstance(found, KubeError):
            raise found
        return found

    def deployment(
        self, annotations: dict[str, str], *, written: float | None = None, template: dict[str, str] = CLASS
    ) -> None:
        """`written`: so many seconds ago the scaler wrote the last time."""
        fields = {"f:metadata": {"f:annotations": {f"f:{KEYS.scaled}": {}}}}
        entry = {"manager": "berth", "fieldsV1": fields, "time": rfc3339(ago(written or 0))}
        meta: Json = {"name": "resnet", "namespace": "a", "annotations": annotations}
        if written is not None:
            meta["managedFields"] = [{"manager": "kubectl"}, entry]
        spec = {"replicas": 3, "template": {"metadata": {"annotations": template}}}
        self.there[DEPLOYMENT] = {"metadata": meta, "spec": spec, "status": {"readyReplicas": 2}}

    def lease(self, holder: str, *, renewed: float = 1.0) -> None:
        stamp = micro_time(ago(renewed))
        self.there[LEASE] = {
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": stamp}
        }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Server]:
        yield server

    monkeypatch.setattr(scale, "open_client", opened)
    monkeypatch.setattr(scale, "utc_now", lambda: NOW)
    return server


async def call(*argv: str) -> None:
    options = parse_options(scale.ScaleOptions, process="scale", summary="", argv=argv, environ={})
    await scale.main(options, asyncio.Event())


def figures() -> Json:
    models = FakeModels()
    model = models.add(
        "a/resnet",
        target="2",
        ready=2,
        replicas=3,
        recommended=7,
        desired=5,
        requested=3,
        capacity_limited=2,
        message="2 GPUMemoryInsufficient (1.2 GiB short on the best GPU)",
        concurrency=Averages(7.25, 14.0),
        waiting=Averages(1.0, None),
        in_panic=True,
        since_ns=int(ago(90).timestamp()) * SECOND_NS,
        buffered=4,
        decisions=(
            DecisionView(at_ns=int(ago(200).timestamp()) * SECOND_NS, recommended=-1, desired=-1, requested=0, ready=0, in_panic=False),
            DecisionView(at_ns=int(ago(90).timestamp()) * SECOND_NS, recommended=7, desired=5, requested=3, ready=1, in_panic=True, message="\x1b[31mno room"),
        ),
        cold_starts=(
            ColdStartView(at_ns=int(ago(95).timestamp()) * SECOND_NS, phases=(("decide", 0.01), ("schedule", 0.1), ("load", 2.4), ("serve", 0.0))),
            ColdStartView(at_ns=int(ago(30).timestamp()) * SECOND_NS, phases=(("decide", 0.02),)),
        ),
    )  # fmt: skip
    return to_json(models.views[model])


async def test_the_leaders_figures_are_shown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.deployment({})
    server.lease("berth-scaler-7d-x2-17-0a0b0c0d@10.0.0.7:9093")
    server.there[PROXY] = figures()
    await call("resnet", "-n", "a")
    shown = capsys.readouterr().out
    for words in (
        "a/resnet",
        "2 of concurrency per replica, over 60 s; in panic from 2 times as much over 6 s",
        "desired 5, requested 3, ready 2 (spec.replicas: 3)",
        "2 of the desired replicas cannot be scheduled: 2 GPUMemoryInsufficient (1.2 GiB short on the best GPU)",
        "active for 90s, in panic",
        "4 requests wait for a replica",
    ):
        assert words in shown, shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["requests", "at", "once", "7.25", "14"] in lines
    assert ["requests", "waiting", "1", "?"] in lines
    assert ["90s", "ago", "7", "5", "3", "1", "yes", "[31mno", "room"] in lines, "newest first, and no escape"
    assert ["3m", "ago", "?", "?", "0", "0", "no"] in lines
    (cold_start,) = [line for line in lines if line[:2] == ["95s", "ago"]]
    assert " ".join(cold_start[2:]) == "2.51 s decide 0.01 s, schedule 0.1 s, load 2.4 s, serve 0 s"
    assert ["30s", "ago", "not", "served", "decide", "0.02", "s"] in lines, (
        "a cold start that served no request has no duration"
    )
    assert "FROM" not in shown
    assert lines.index(["3m", "ago", "?", "?", "0", "0", "no"]) > [line[:1] for line in lines].index(["90s"])
    assert ["CLASS", "kpa.autoscaling.knative.dev"] in lines
    assert ["SCALE", "0", "to", "any,", "initially", "1"] in lines

    await call("resnet", "-n", "a", "-o", "json")
    told = json.loads(capsys.readouterr().out)
    assert (told["from"], told["error"], told["desired"], told["concurrency"]["stable"]) == (
        "leader",
        "",
        5,
        7.25,
    )


@pytest.mark.parametrize(("is_scaled", "holds"), [(True, True), (False, False)])
async def test_valid_annotations_stay_in_effect_where_there_were_any(
    server: Server, capsys: pytest.CaptureFixture[str], is_scaled: bool, holds: bool
) -> None:
    template = CLASS | {"autoscaling.knative.dev/min-scale": "3", "autoscaling.knative.dev/max-scale": "2"}
    server.deployment({}, template=template)
    server.lease("berth-scaler-7d-x2-17-0a0b0c0d@10.0.0.7:9093")
    server.there[PROXY] = (
        figures() | {"invalid": "as it is"} if is_scaled else response_error(404, "", "not scaled here")
    )
    await call("resnet", "-n", "a")
    shown = capsys.readouterr().out
    assert "INVALID" in shown
    assert ("the last valid annotations stay in effect" in shown) == holds


def test_the_scale_is_that_in_effect() -> None:
    told = {"minScale": 0, "maxScale": 0, "initialScale": 2, "scaleToZero": False}
    assert scale._scale(told) == "1 to any, initially 2"
    assert scale._scale(told | {"minScale": 3, "maxScale": 9}) == "3 to 9, initially 2"
    assert scale._scale(told | {"scaleToZero": True}) == "0 to any, initially 2"


@pytest.mark.parametrize(
    ("now", "state"),
    [
        ({}, "scaled to zero: the next request starts a replica"),
        ({"desired": None}, "scaled to zero: the next request starts a replica"),
        ({"buffered": 1}, "activating for 30s"),
        ({"ready": 1, "requested": 1}, "activating for 30s"),
        ({"message": "its files are refused"}, "activating for 30s"),
        ({"activity": Activity.INACTIVE}, "scaled to zero: the next request starts a replica"),
        ({"activity": Activity.INACTIVE, "ready": 1}, "inactive for 30s"),
        ({"activity": Activity.ACTIVE}, "active for 30s"),
    ],
)
async def test_a_model_without_a_replica_is_scaled_to_zero(
    server: Server, capsys: pytest.CaptureFixture[str], now: Json, state: str
) -> None:
    models = FakeModels()
    since_ns = int(ago(30).timestamp()) * SECOND_NS
    view = {"desired": 0, "requested": 0, "ready": 0, "replicas": 0, "activity": Activity.ACTIVATING} | now
    models.add("a/resnet", since_ns=since_ns, **view)
    server.deployment({})
    server.lease("berth-scaler-7d-x2-17-0a0b0c0d@10.0.0.7:9093")
    server.there[PROXY] = to_json(*models.views.values())
    await call("resnet", "-n", "a")
    assert state in capsys.readouterr().out


async def test_without_a_leader_no_request_is_said_to_start_a_replica(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.deployment({KEYS.scaled: Scaled(desired=0, requested=0, activity="False").to_text()})
    server.there[DEPLOYMENT]["status"] = {}  # type: ignore[index]
    await call("resnet", "-n", "a")
    shown = capsys.readouterr().out
    assert "scaled to zero" in shown
    assert "next request" not in shown


@pytest.mark.parametrize(
    ("holder", "renewed", "proxy", "words"),
    [
        (None, 0, None, "no scaler has ever led: there is no Lease berth-system/berth-scaler"),
        ("", 0, None, "no scaler leads at this moment"),
        ("berth-scaler-7d-x2-17-0a@10.0.0.7:9093", 100, None, "no scaler leads since 85s"),
        ("berth-scaler-7d-x2-17-0a", 1, None, "is gone"),
        ("berth-scaler-7d-x2-17-0a", 1, response_error(404, "", "not scaled here"), "does not scale it yet"),
        ("berth-scaler-7d-x2-17-0a", 1, response_error(403, "Forbidden", "pods/proxy"), "403 Forbidden"),
        ("berth-scaler-7d-x2-17-0a", 1, KubeUnreachable("timed out"), "timed out"),
    ],
)
async def test_without_the_leader_what_is_written_is_shown_with_its_age(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    holder: str | None,
    renewed: float,
    proxy: KubeError | None,
    words: str,
) -> None:
    scaled = Scaled(
        desired=5,
        requested=3,
        ready=1,
        capacity_limited=2,
        message="no room",
        in_panic=True,
        activity="True",
        since=1e9,
    )
    server.deployment({KEYS.scaled: scaled.to_text()}, written=150)
    if holder is not None:
        server.lease(holder, renewed=renewed)
    if proxy is not None:
        server.there[PROXY] = proxy
    await call("resnet", "--namespace=a")
    shown = capsys.readouterr().out
    assert "status of 2m ago: " in shown
    assert words in shown
    # What is ready the Deployment itself knows better.
    assert "desired 5, requested 3, ready 2 (spec.replicas: 3)" in shown
    assert "LOAD" not in shown
    await call("resnet", "--namespace=a", "--output=json")
    told = json.loads(capsys.readouterr().out)
    assert (told["from"], told["capacityLimited"], told["message"]) == ("annotation", 2, "no room")
    assert words in told["error"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        '{"desired": "many"}',
        '{"since": 1e300, "activity": "gone", "ready": 99999999999999999999}',
        '{"since": -1, "message": "\\u001b[2J"}',
    ],
)
async def test_garbage_in_the_annotation_is_shown_as_not_known(
    server: Server, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    server.deployment({} if text is None else {KEYS.scaled: text})
    await call("resnet", "-n", "a")
    shown = capsys.readouterr().out
    assert "desired ?, requested ?, ready 2" in shown
    assert "\x1b" not in shown


async def test_a_scaler_that_is_no_pod_is_asked_itself(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.deployment({})
    server.lease("host-17-0a@127.0.0.1:9093")

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/models/a/resnet"
        return web.json_response(figures())

    async with serving(answer) as url:
        monkeypatch.setattr(scale, "ADMIN_PORT", int(url.rpartition(":")[2]))
        await call("resnet", "-n", "a", "-o", "json")
    assert json.loads(capsys.readouterr().out)["from"] == "leader"
    await call("resnet", "-n", "a", "-o", "json")
    assert "cannot be asked" in json.loads(capsys.readouterr().out)["error"]


async def test_what_berth_allows_beyond_knative_is_not_refused(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    retention = {"autoscaling.knative.dev/scale-to-zero-pod-retention-period": "until-needed"}
    server.deployment({}, template={**CLASS, **retention})
    await call("resnet", "-n", "a")
    assert "INVALID" not in capsys.readouterr().out


async def test_annotations_that_do_not_go_are_named(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.deployment({}, template={**CLASS, "autoscaling.knative.dev/window": "5s"})
    await call("resnet", "-n", "a")
    assert (
        "autoscaling.knative.dev/window: '5s' is invalid; use a duration, 6s to 1h" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("argv", "error", "words"),
    [
        (["bert", "-n", "a"], Failed, "Deployment a/bert does not exist; -n names another namespace"),
        (["resnet", "-n", "b"], Failed, "Deployment b/resnet does not exist"),
        (["a/resnet"], ConfigError, "the namespace goes with -n"),
        (["resnet", "-o", "yaml"], ConfigError, "table, json"),
    ],
)
async def test_errors_say_what_would_be_right(
    server: Server, argv: list[str], error: type[Exception], words: str
) -> None:
    server.deployment({})
    with pytest.raises(error, match=words):
        await call(*argv)


async def test_who_may_not_see_who_leads_is_told_so(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.deployment({})
    server.there[LEASE] = response_error(403, "Forbidden", "leases")
    await call("resnet", "-n", "a")
    assert "who leads may not be read: 403 Forbidden" in " ".join(capsys.readouterr().out.split())


async def test_who_has_not_asked_is_told_how(server: Server) -> None:
    server.deployment({}, template={})
    with pytest.raises(Failed, match=r"keeps its replicas: 3; .*autoscaling.knative.dev/class: kpa"):
        await call("resnet", "-n", "a")
    server.there[DEPLOYMENT] = KubeUnreachable("refused")
    with pytest.raises(CannotStart, match="https://server: refused"):
        await call("resnet", "-n", "a")
