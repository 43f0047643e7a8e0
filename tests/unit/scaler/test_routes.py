"""Services and slices find their models, and slices that nobody needs any more are ended."""

from dataclasses import replace
from typing import Any

import pytest

from berth.contract.activation import RouteMode
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from scaler.activation.activators import RETURN_NS
from scaler.activation.ports import REUSE_AFTER_NS, PortAllocator, PortPair
from scaler.activation.route import MOST_SERVICES, TOO_MANY_SERVICES, Apply, Delete, RouteSpec, SliceAction
from scaler.activation.routes import RouteReconciler
from scaler.activation.service_index import Template
from scaler.activation.slices import ProxyPorts, desired_slice, leads_to, read_slice, service_of
from scaler.go import SECOND_NS

T0 = 1_700_000_000 * SECOND_NS
DOOR = ProxyPorts(9000, 9001, {"http": 9000, "grpc": 9001, "admin": 9090})
M, N = ModelKey("a", "m"), ModelKey("a", "n")
Json = dict[str, Any]


def service(
    name: str = "m", *, uid: str = "", selector: Any = None, namespace: str = "a", **spec: Any
) -> Json:
    ports = [
        {"name": "http", "port": 80, "targetPort": "http"},
        {"name": "grpc", "port": 90, "targetPort": 9001},
    ]
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}"},
        "spec": {"clusterIP": "10.96.0.1", "ports": ports, "selector": selector or {"app": name}, **spec},
    }


def endpoints(
    service: str, *addresses: str, ready: bool | None = True, uid: str = "", ours: bool = False
) -> Json:
    labels = {"kubernetes.io/service-name": service}
    if ours:
        labels["endpointslice.kubernetes.io/managed-by"] = "berth-scaler"
    conditions = {} if ready is None else {"ready": ready}
    return {
        "metadata": {
            "name": f"{service}-x",
            "namespace": "a",
            "uid": uid or f"slice-{service}",
            "labels": labels,
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [one], "conditions": conditions} for one in addresses],
    }


def as_written(action: SliceAction, created: str = "2023-11-14T22:13:00Z") -> Json:
    body = action.slice.to_json()
    body["metadata"] |= {"uid": f"ours-{body['metadata']['name']}", "creationTimestamp": created}
    return body


def board(*models: ModelKey, ports: PortAllocator | None = None) -> RouteReconciler:
    made = RouteReconciler(began_ns=T0 - RETURN_NS, ports=ports)
    for model in models:
        made.set_model(model, template(model.name))
    return made


def template(name: str, **labels: str) -> Template:
    return Template({"app": name, **labels}, DOOR)


def asked(model: ModelKey = M, *, needs_proxy: bool = True) -> RouteSpec:
    return RouteSpec(model=model, needs_proxy=needs_proxy, public_name=model.name)


def listen(made: RouteReconciler, model: ModelKey = M) -> PortPair:
    """One activator, which opens what it is told."""
    one = made.activators.connect(PodUid("act"), "act", "10.0.1.1", None)
    told = made.reconcile(asked(model), T0).assignments[one.uid]
    pair = PortPair(told.rest_port, told.grpc_port)
    made.activators.set_open(one, model, pair)
    one.has_reported = True
    return pair


@pytest.mark.parametrize(
    ("spec", "leads"),
    [
        ({}, True),
        ({"clusterIP": "None"}, False),  # its clients connect to pods' ports by themselves
        ({"clusterIP": ""}, False),
        ({"type": "ExternalName", "clusterIP": None}, False),
        ({"clusterIP": "fd00::1", "ipFamilies": ["IPv6"]}, False),  # no slice of ours is its
        ({"clusterIP": "fd00::1", "ipFamilies": ["IPv6", "IPv4"]}, True),
        ({"selector": {"app": "other"}}, False),
        ({"selector": {"app": "m", "track": "x"}}, False),
        ({"ports": [{"port": 9090, "targetPort": "admin"}]}, False),
        ({"ports": [{"port": 9000, "targetPort": 9000, "protocol": "UDP"}]}, False),
        ({"ports": [{"port": 9000}]}, True),
        ({"ports": [{"port": 9000, "targetPort": "unknown"}]}, False),
    ],
)
def test_which_services_lead_to_a_model(spec: Json, leads: bool) -> None:
    made = board(M)
    made.services.set_service(service(**spec))
    made.activators.connect(PodUid("act"), "act", "10.0.1.1", None)
    assert (made.reconcile(asked(), T0).mode is RouteMode.PROXY) is leads


def test_a_service_without_a_selector_leads_nowhere() -> None:
    made = board(M)
    made.services.set_service({**service(), "spec": {"clusterIP": "10.96.0.1"}})
    assert made.reconcile(asked(), T0).failure


def test_the_slice_has_those_ports_of_the_service_that_are_the_models() -> None:
    raw = service(
        ports=[
            {"name": "metrics", "port": 1, "targetPort": "admin"},
            {"name": "g", "port": 2, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"},
            {"port": 3, "targetPort": 9000},
        ]
    )
    found = service_of(raw, DOOR)
    assert found is not None
    assert [(port.name, port.is_grpc, port.app_protocol) for port in found.ports] == [
        ("g", True, "kubernetes.io/h2c"),
        ("", False, None),
    ]


def test_what_is_written_is_read_again_as_the_same() -> None:
    made = board(M)
    made.services.set_service(service())
    listen(made)
    (action,) = made.reconcile(asked(), T0).slices
    assert read_slice(as_written(action)) == action.slice
    made.services.set_slice(as_written(action))
    decision = made.reconcile(asked(), T0 + 9 * SECOND_NS)
    assert decision.proven
    assert decision.slices == ()
    assert decision.proxied_since_ns == T0 + 9 * SECOND_NS
    # For the next scaler since it was made, for it was there before.
    later = board(M)
    later.services.set_service(service())
    later.services.set_slice(as_written(action))
    later.adopt(T0)
    listen(later)
    assert later.reconcile(asked(), T0 + 9 * SECOND_NS).proxied_since_ns == 1_699_999_980 * SECOND_NS


def test_a_slice_is_read_as_what_it_is() -> None:
    raw = service(ports=[{"name": "g", "port": 2, "targetPort": 9001, "appProtocol": "kubernetes.io/h2c"}])
    found = service_of(raw, DOOR)
    assert found is not None
    ours = desired_slice(found, PortPair(20000, 20001), ["10.0.1.2", "10.0.1.1"])
    stands = as_written(Apply(ours))
    assert read_slice(stands) == ours
    # However it was written.
    stands["endpoints"].reverse()
    assert read_slice(stands) == ours
    owner = stands["metadata"]["ownerReferences"][0]
    another, of_another_kind = owner | {"uid": "x"}, owner | {"uid": "x", "kind": "Deployment"}
    for owners, uid in (
        ([owner, of_another_kind], "uid-m"),
        ([owner, another], ""),
        ([of_another_kind], ""),
        (None, ""),
    ):
        stands["metadata"]["ownerReferences"] = owners
        assert read_slice(stands) == replace(ours, service_uid=uid)
    assert read_slice({**stands, "addressType": "IPv6"}) is None
    for name in ("m", "m-berth-2", "n-berth"):
        assert read_slice({**stands, "metadata": {**stands["metadata"], "name": name}}) is None


@pytest.mark.parametrize(
    ("slices", "goes"),
    [
        ([], False),
        ([endpoints("m", "10.0.0.9")], True),
        ([endpoints("m", "10.0.0.9", ready=None)], True),  # unknown counts as ready
        ([endpoints("m", "10.0.0.9", ready=False)], False),
        ([endpoints("m")], False),
        ([endpoints("m", "10.0.0.9", ours=True)], False),
        ([endpoints("other", "10.0.0.9")], False),
        ([endpoints("m", "10.0.0.9", ready=False), endpoints("m", "10.0.0.8", uid="second")], True),
    ],
)
def test_ours_goes_when_a_replica_is_ready_in_another(slices: list[Json], goes: bool) -> None:
    made = board(M)
    made.services.set_service(service())
    listen(made)
    (action,) = made.reconcile(asked(), T0).slices
    made.services.set_slice(as_written(action))
    for one in slices:
        made.services.set_slice(one)
    decision = made.reconcile(asked(needs_proxy=False), T0)
    assert any(isinstance(one, Delete) for one in decision.slices) is goes


def test_whatever_happens_to_a_service_its_models_are_looked_at() -> None:
    made = board(M, N)
    made.services.changed.clear()
    made.services.set_service(service())
    assert made.services.changed == {M}
    made.services.changed.clear()
    made.services.set_slice(endpoints("m", "10.0.0.9"))
    made.services.delete_slice(endpoints("m", "10.0.0.9"))
    assert made.services.changed == {M}
    made.services.changed.clear()
    made.services.set_slice(endpoints("nobodys", "10.0.0.9"))
    made.services.set_service(service("nobodys", namespace="b"))
    assert made.services.changed == set()
    made.services.set_service(service(selector={"app": "n"}))  # it leads to another from now on
    assert made.services.changed == {M, N}
    made.services.changed.clear()
    made.services.delete_service(service(uid="an older one of the name"))
    assert made.services.changed == set()
    made.services.delete_service(service())
    assert made.services.changed == {N}


def test_a_service_of_two_models_is_neithers() -> None:
    made = board(M, N)
    made.services.set_service(service("both", selector={"kind": "model"}))
    made.set_model(M, template("m", kind="model"))
    made.services.changed.clear()
    made.set_model(N, template("n", kind="model"))
    assert made.services.changed == {M, N}
    assert made.reconcile(asked(M), T0).failure == "Service both leads to a/n as well"
    made.delete_model(N, T0)
    assert M in made.services.changed
    assert made.reconcile(asked(M), T0).mode is RouteMode.PROXY


def test_slices_of_ours_that_nothing_needs_are_ended() -> None:
    def standing() -> RouteReconciler:
        made = board(M)
        made.services.set_service(service())
        listen(made)
        (action,) = made.reconcile(asked(), T0).slices
        made.services.set_slice(as_written(action))
        made.services.set_slice(endpoints("m", "10.0.0.9"))  # the controller's own is never touched
        assert made.expire(T0) == ()
        return made

    gone = standing()
    gone.delete_model(M, T0)
    assert [one.slice.name for one in gone.expire(T0)] == ["m-berth"]
    no_service = standing()
    no_service.services.delete_service(service())
    assert [one.slice.name for one in no_service.expire(T0)] == ["m-berth"]
    elsewhere = standing()
    elsewhere.services.set_service(service(selector={"app": "other"}))
    assert [one.slice.name for one in elsewhere.expire(T0)] == ["m-berth"]
    headless = standing()
    headless.services.set_service(service(clusterIP="None"))
    assert [one.slice.name for one in headless.expire(T0)] == ["m-berth"]
    # The scaler's own that has been made another's by hand, or by a hostile one, is left to whoever did it.
    made = standing()
    made.delete_model(M, T0)
    made.services.set_slice({**endpoints("m", "10.0.0.9", ours=True, uid="ours-m-berth")})
    assert made.expire(T0) == ()


def test_a_scaler_that_starts_gives_nobody_the_ports_of_a_slice_that_stands() -> None:
    first = board(M)
    first.services.set_service(service())
    pair = listen(first)
    (action,) = first.reconcile(asked(), T0).slices
    # N would get M's ports by its name, if it came first.
    taken = PortAllocator(range(pair.rest, pair.rest + 4))
    made = board(N, M, ports=taken)
    for one in (service(), service("n")):
        made.services.set_service(one)
    made.services.set_slice(as_written(action))
    made.adopt(T0)
    made.activators.connect(PodUid("act"), "act", "10.0.1.1", None)
    other = made.reconcile(asked(N), T0).assignments[PodUid("act")]
    same = made.reconcile(asked(M), T0).assignments[PodUid("act")]
    assert (same.rest_port, same.grpc_port) == pair
    assert other.rest_port != same.rest_port


@pytest.mark.parametrize("made_up", ["2025-12-31T00:00:00Z", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])
def test_a_slice_that_a_tenant_has_made_up_leads_nobody_to_it(made_up: str) -> None:
    """It bears our label and has another model's ports: older, newer, nobody can tell which is made up."""
    first = board(M)
    first.services.set_service(service())
    pair = listen(first)
    (action,) = first.reconcile(asked(), T0).slices
    assert isinstance(action, Apply)
    stands, forged = as_written(action), as_written(action)
    stands["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    forged["metadata"] |= {"name": "n-berth", "uid": "forged", "creationTimestamp": made_up}
    forged["metadata"]["labels"] = {**forged["metadata"]["labels"], "kubernetes.io/service-name": "n"}
    # Few enough that one of them would get these again by its name.
    ports = PortAllocator(range(pair.rest, pair.rest + 8))
    made = board(N, M, ports=ports)
    for one in (service(), service("n")):
        made.services.set_service(one)
    made.services.set_slice(stands)
    made.services.set_slice(forged)
    made.adopt(T0)
    made.activators.connect(PodUid("act"), "act", "10.0.1.1", None)
    told = {model: made.reconcile(asked(model), T0).assignments[PodUid("act")].rest_port for model in (N, M)}
    assert len(set(told.values())) == 2
    assert pair.rest not in told.values()
    made.expire(T0 + REUSE_AFTER_NS)
    assert len(ports) == 2, "they are somebody's again after a while"


def test_of_two_models_that_share_a_service_the_other_is_looked_at_when_one_comes_or_goes() -> None:
    made = board(M)
    made.services.set_service(service())
    made.services.changed.clear()
    made.set_model(N, template("m"))
    assert made.services.changed == {M, N}
    made.services.changed.clear()
    made.delete_model(N, T0)
    assert M in made.services.changed


def test_models_that_share_many_services_are_not_all_looked_at_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tenant may have as many of both as it likes."""
    count = 0

    def counted(*args: Any) -> bool:
        nonlocal count
        count += 1
        return leads_to(*args)

    monkeypatch.setattr("scaler.activation.service_index.leads_to", counted)
    made = board()
    for number in range(60):
        made.services.set_service(service(f"s{number}", selector={"app": "m"}))
    models = [ModelKey("a", f"m{number}") for number in range(60)]
    for model in models:
        made.set_model(model, template("m"))
    for model in models:
        decision = made.reconcile(asked(model), T0)
        assert decision.failure == TOO_MANY_SERVICES
    assert count < 4 * 60 * 60 * 2


def test_a_model_has_so_many_services_and_no_more() -> None:
    made = board(M)
    for number in range(MOST_SERVICES):
        made.services.set_service(service(f"s{number}", selector={"app": "m"}))
    listen(made)
    assert len(made.reconcile(asked(), T0).slices) == MOST_SERVICES
    made.services.set_service(service("one-more", selector={"app": "m"}))
    assert made.reconcile(asked(), T0).failure == TOO_MANY_SERVICES


def test_nothing_is_left_of_what_is_gone() -> None:
    made = board(M, N)
    made.services.set_service(service())
    made.services.set_slice(endpoints("m", "10.0.0.9"))
    made.services.delete_slice(endpoints("m", "10.0.0.9"))
    made.services.delete_service(service())
    made.delete_model(M, T0)
    made.delete_model(N, T0)
    made.delete_model(N, T0)
    buffered = {name: value for name, value in vars(made).items() if isinstance(value, dict) and value}
    assert buffered == {}


def test_a_slice_that_becomes_anothers_is_that_ones_alone() -> None:
    made = board(M, N)
    made.services.set_service(service())
    made.services.set_service(service("n", selector={"app": "n"}))
    made.services.set_slice(endpoints("m", "10.0.0.9", uid="one"))
    made.services.changed.clear()
    made.services.set_slice(endpoints("n", "10.0.0.9", uid="one"))
    assert made.services.changed == {M, N}
    nobodys = endpoints("n", "10.0.0.9", uid="one")
    nobodys["metadata"]["labels"] = {}
    made.services.set_slice(nobodys)
    made.services.delete_service(service())
    made.services.delete_service(service("n"))
    for model in (M, N):
        made.delete_model(model, T0)
    assert not any(value for value in vars(made).values() if isinstance(value, dict))


def test_of_a_service_with_two_slices_one_may_go() -> None:
    made = board(M)
    made.services.set_service(service())
    listen(made)
    (action,) = made.reconcile(asked(), T0).slices
    made.services.set_slice(as_written(action))
    first, second = endpoints("m", "10.0.0.8", uid="1"), endpoints("m", "10.0.0.9", uid="2")
    for one in (first, second):
        made.services.set_slice(one)
    made.services.delete_slice(first)
    assert [type(one) for one in made.reconcile(asked(needs_proxy=False), T0).slices] == [Delete]
    made.services.delete_slice(second)
    assert made.reconcile(asked(needs_proxy=False), T0).slices == ()


def test_the_ports_of_a_model_that_is_gone_are_free_after_a_while() -> None:
    ports = PortAllocator()
    made = board(M, ports=ports)
    made.services.set_service(service())
    listen(made)
    made.delete_model(M, T0)
    made.expire(T0 + REUSE_AFTER_NS - 1)
    assert ports.get(M)
    made.expire(T0 + REUSE_AFTER_NS)
    assert ports.get(M) is None
