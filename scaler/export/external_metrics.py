"""`external.metrics.k8s.io/v1beta1`: a model's figures for a HorizontalPodAutoscaler, behind the API server's aggregator.

Only the aggregator is served (`scaler.export.front_proxy`); what its caller may see the API server has asked RBAC before, by the
namespace of the path. So nothing but that namespace's models is ever among an answer's items.

Source: k8s.io/metrics pkg/apis/external_metrics/v1beta1/types.go; how a HorizontalPodAutoscaler reads it: k8s.io/kubernetes
pkg/controller/podautoscaler/metrics/client.go (it adds up all items).
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from typing import Any, Final

from aiohttp import web

from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.contract.text import one_line
from berth.kube.times import rfc3339, utc_now
from scaler.core.models_view import ModelsView, ModelView
from scaler.export.figures import DESIRED, FIGURES, figure
from scaler.export.selectors import Selector, parse_selector

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
_ROOT: Final = f"/apis/{GROUP}/{VERSION}"
METRICS: Final = {f"berth-{name}": name for name in FIGURES}
# Of a name in a path: as Kubernetes allows them, so that nothing has to be decoded.
_NAME: Final = "[a-z0-9][a-z0-9-]{0,252}"
# A thousandth of it is a quantity within 64 bits.
_LARGEST: Final = 2.0**53


class ExternalMetrics:
    """The API's documents, of the models as they are shown at this moment."""

    def __init__(self, models: ModelsView, *, now: Callable[[], datetime] = utc_now) -> None:
        self._models, self._now = models, now

    def application(self, guard: "Callable[[web.Request], str | None]") -> web.Application:
        """`guard` gives the reason why a caller is not served, or None."""
        application = web.Application(middlewares=[_guarded(guard), _as_status])
        for path, document in _DISCOVERY.items():
            application.router.add_get(path, _answering(document))
        application.router.add_get(f"{_ROOT}/namespaces/{{namespace:{_NAME}}}/{{metric:{_NAME}}}", self._list)
        return application

    async def _list(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["metric"]
        if name not in METRICS:
            raise _Refused(404, "NotFound", f"there is no metric {name}; there are {', '.join(METRICS)}")
        try:
            selector = parse_selector(request.query.get("labelSelector", ""))
        except InvalidValue as error:
            raise _Refused(400, "BadRequest", f"labelSelector: {one_line(str(error))}") from None
        if not self._models.leads:
            raise _Refused(503, "ServiceUnavailable", "this replica of the scaler does not lead; ask again")
        items = [self._item(view, name) for view in self._selected(namespace, selector)]
        return web.json_response({**_kind("ExternalMetricValueList"), "metadata": {}, "items": items})

    def _selected(self, namespace: str, selector: Selector) -> Iterator[ModelView]:
        for name in self._models.names(namespace):
            if selector({"model": name}):
                view = self._models.view(ModelKey(namespace, name))
                if view is not None:
                    yield view

    def _item(self, view: ModelView, name: str) -> Json:
        """A sum must not count what is missing as 0."""
        value = figure(view, METRICS[name])
        if value is None:
            raise _Refused(503, "ServiceUnavailable", f"nothing is known of {view.model} yet; ask again")
        item: Json = {
            "metricName": name,
            "metricLabels": {"model": view.model.name},
            "timestamp": rfc3339(self._now()),
            "value": quantity(value),
        }
        if view.spec is not None and METRICS[name] != DESIRED:
            item["window"] = view.spec.stable_window_seconds
        return item


def quantity(value: float) -> str:
    """In thousandths, rounded up: what is more than 0 is not shown as 0."""
    thousandths = math.ceil(min(value, _LARGEST) * 1000)
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)


class _Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


def _guarded(guard: "Callable[[web.Request], str | None]") -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        """A caller that is not let in learns nothing of what there is."""
        refused = guard(request)
        if refused is not None:
            return _status(_Refused(401, "Unauthorized", refused))
        return await handler(request)

    return middleware


@web.middleware
async def _as_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        # The API server has asked RBAC about the path as it reads it; another reading is none of ours.
        if "%" in request.raw_path.partition("?")[0]:
            raise web.HTTPNotFound
        return await handler(request)
    except _Refused as error:
        return _status(error)
    except web.HTTPException as error:
        return _status(_Refused(error.status, error.reason.replace(" ", ""), f"not here: {error.reason}"))


def _status(refused: _Refused) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    status = {**body, "message": str(refused), "reason": refused.reason, "code": refused.code}
    return web.json_response(status, status=refused.code)


def _answering(document: Json) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(document)

    return handler


def _kind(kind: str) -> Json:
    return {"kind": kind, "apiVersion": f"{GROUP}/{VERSION}"}


def _discovery() -> dict[str, Json]:
    version = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
    group = {"name": GROUP, "versions": [version], "preferredVersion": version}
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        for name in METRICS
    ]
    return {
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        f"/apis/{GROUP}": {"kind": "APIGroup", "apiVersion": "v1", **group},
        _ROOT: {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{GROUP}/{VERSION}",
            "resources": resources,
        },
    }


_DISCOVERY: Final = _discovery()
