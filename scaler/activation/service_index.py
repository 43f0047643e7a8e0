"""Which Services lead to which models, and the EndpointSlices of each. Pure: informers feed it.

Only what is in opted-in namespaces is needed; a Service finds its models by their pods' labels.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TypeVar

from berth.contract.scaling import ModelKey
from scaler.activation.route import MOST_SERVICES, Delete, ObservedService
from scaler.activation.slices import (
    Json,
    ProxyPorts,
    Service,
    ServiceRef,
    is_ours,
    leads_to,
    read_slice,
    ready_endpoints,
    ref_of,
    service_named,
    service_of,
)
from scaler.go import SECOND_NS

_Item = tuple[str, str, str]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Template:
    """Of a model's pods: what Services select them by, and where they take requests."""

    labels: Mapping[str, str]
    ports: ProxyPorts


class ServiceIndex:
    def __init__(self) -> None:
        # Models whose observed Services may have changed; the reconciler takes them out.
        self.changed: set[ModelKey] = set()
        self._templates: dict[ModelKey, Template] = {}
        self._services: dict[ServiceRef, Json] = {}
        self._slices: dict[ServiceRef, dict[str, Json]] = defaultdict(dict)
        # By uid: whose a slice is. A label says so, which may change.
        self._slice_of: dict[str, ServiceRef] = {}
        # By (namespace, label, value): a Service under one item of its selector, a model under each of its labels.
        self._selecting: dict[_Item, set[ServiceRef]] = defaultdict(set)
        self._labelled: dict[_Item, set[ModelKey]] = defaultdict(set)

    # What informers tell.

    def set_model(self, model: ModelKey, template: Template) -> None:
        if self._templates.get(model) != template:
            self._forget_template(model)
            self._templates[model] = template
            for item in _items(model.namespace, template.labels):
                self._labelled[item].add(model)
            self._touch(model)

    def delete_model(self, model: ModelKey) -> None:
        """It is not scaled any more: its slices are stale from now on."""
        self._touch(model)
        self._forget_template(model)
        self.changed.discard(model)

    def set_service(self, service: Json) -> None:
        """The models that it selected before have changed as well."""
        ref = ref_of(service)
        self._forget_service(ref)
        self._services[ref] = service
        if (item := _selected_by(service)) is not None:
            self._selecting[item].add(ref)
        self._touch_service(ref)

    def delete_service(self, service: Json) -> None:
        ref = ref_of(service)
        if ref in self._services and _uid(self._services[ref]) == _uid(service):
            self._forget_service(ref)

    def set_slice(self, one: Json) -> None:
        """The Service that it was of before has one less."""
        uid, ref = _uid(one), service_named(one)
        if self._slice_of.get(uid) != ref:
            self.delete_slice(one)
        if ref is not None:
            self._slices[ref][uid], self._slice_of[uid] = one, ref
            self._touch_service(ref)

    def delete_slice(self, one: Json) -> None:
        uid = _uid(one)
        if (ref := self._slice_of.pop(uid, None)) is not None:
            del self._slices[ref][uid]
            if not self._slices[ref]:
                del self._slices[ref]
            self._touch_service(ref)

    # What is asked of it.

    def observed(self, model: ModelKey) -> list[ObservedService]:
        """A model's Services; of many one more than a model may have: a pass costs no more."""
        ports, found = self._templates[model].ports, list[ObservedService]()
        for ref in sorted(self._services_of(model), key=lambda one: one.name):
            service = service_of(self._services[ref], ports)
            if service is not None:
                found.append(self._observed_service(model, service))
            if len(found) > MOST_SERVICES:
                break
        return found

    def stale_slices(self) -> Iterator[Delete]:
        """Slices of ours that nothing needs any more: their model or their Service is another."""
        for ref, slices in self._slices.items():
            ours = [one for one in slices.values() if is_ours(one)]
            if ours and not self._is_needed(ref):
                yield from (Delete(read) for one in ours if (read := read_slice(one)) is not None)

    def _is_needed(self, ref: ServiceRef) -> bool:
        service = self._services.get(ref)
        if service is None:
            return False
        return any(service_of(service, self._templates[model].ports) for model in self._models_of(service))

    def _observed_service(self, model: ModelKey, service: Service) -> ObservedService:
        slices = self._slices.get(service.ref, {}).values()
        ours = [(read, one) for one in slices if is_ours(one) and (read := read_slice(one)) is not None]
        others = (other for other in self._models_of(self._services[service.ref]) if other != model)
        return ObservedService(
            service,
            ready_endpoints(slices),
            ours=ours[0][0] if ours else None,
            since_ns=_created_ns(ours[0][1]) if ours else 0,
            shared_with=next(others, None),
        )

    def _services_of(self, model: ModelKey) -> Iterator[ServiceRef]:
        labels = self._templates[model].labels
        for item in _items(model.namespace, labels):
            for ref in self._selecting.get(item, ()):
                if leads_to(self._services[ref], labels):
                    yield ref

    def _models_of(self, service: Json) -> Iterator[ModelKey]:
        item = _selected_by(service)
        for model in self._labelled.get(item, ()) if item is not None else ():
            if leads_to(service, self._templates[model].labels):
                yield model

    # What has changed.

    def _touch(self, model: ModelKey) -> None:
        """A model that comes or goes changes the one that shares a Service with it. Where more do, each of them still has
        another: of a tenant's many models that share many Services each would else be reconciled for each."""
        self.changed.add(model)
        if model in self._templates:
            for ref in islice(self._services_of(model), MOST_SERVICES + 1):
                sharing = set(islice(self._models_of(self._services[ref]), 3))
                if len(sharing) < 3:
                    self.changed |= sharing

    def _touch_service(self, ref: ServiceRef) -> None:
        if ref in self._services:
            self.changed |= set(self._models_of(self._services[ref]))

    def _forget_template(self, model: ModelKey) -> None:
        template = self._templates.pop(model, None)
        for item in _items(model.namespace, {} if template is None else template.labels):
            _discard(self._labelled, item, model)

    def _forget_service(self, ref: ServiceRef) -> None:
        self._touch_service(ref)
        service = self._services.pop(ref, None)
        if service is not None and (item := _selected_by(service)) is not None:
            _discard(self._selecting, item, ref)


def _items(namespace: str, labels: Mapping[str, str]) -> Iterator[_Item]:
    return ((namespace, key, value) for key, value in labels.items())


def _selected_by(service: Json) -> _Item | None:
    selector = service.get("spec", {}).get("selector")
    return min(_items(ref_of(service).namespace, selector)) if selector else None


def _uid(one: Json) -> str:
    uid: str = one["metadata"]["uid"]
    return uid


def _created_ns(one: Json) -> int:
    """The API server's time; 0 where it says none."""
    text = one["metadata"].get("creationTimestamp")
    return int(datetime.fromisoformat(text).timestamp()) * SECOND_NS if text else 0


def _discard(index: dict[_Item, set[_T]], item: _Item, one: _T) -> None:
    index[item].discard(one)
    if not index[item]:
        del index[item]
