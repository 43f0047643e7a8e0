"""A Deployment that asked to be scaled: what its annotations and its template say. Pure.

Autoscaling's annotations and Berth's options may stand on the pod template or on the Deployment; the template's count. How
many requests a replica accepts at once, and where, stands in the proxy's own arguments alone.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from berth.contract.activation import BufferLimits
from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.contract.quantity import parse_bytes
from berth.contract.scaling import ModelKey, Scaled
from berth.contract.text import one_line
from scaler.activation.slices import ProxyPorts
from scaler.core.actions import Kind
from scaler.core.pods import JsonObject, picked
from scaler.decision.annotations import CONCURRENCY, GROUP, NUMBERS, Annotations, of_deployment
from scaler.decision.bounds import PROGRESS_DEADLINE_NS
from scaler.decision.defaults import HPA, KPA, Defaults
from scaler.decision.spec import Spec, spec_of
from scaler.go import SECOND_NS, parse_duration_ns, parse_float, parse_int

CLASS: Final = GROUP + "class"
UNTIL_NEEDED: Final = "until-needed"
_RETENTION: Final = "scale-to-zero-pod-retention-period"
_FOR_EVER_NS: Final = 1 << 62
_REST_PORT, _GRPC_PORT = 9000, 9001
_PORT_DIGITS: Final = 5
_MOST_REQUESTS: Final = 10**6
MOST_HOLD_SECONDS: Final = 600.0
_MOST_OVERFLOW: Final = 1000
# What one tenant writes is sent to all activators, and to the binder with what all others ask: none may be so large that
# the others' words have no room beside it.
_MOST_CLIENTS: Final = 64
_LONGEST_NAME: Final = 255
MOST_TEMPLATE_BYTES: Final = 128 * 1024
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?|\*", re.ASCII)
_SCALE: Final = "scale"
_PROXY: Final = "proxy"
_PROGRESS_DEADLINE: Final = ("serving.knative.dev/progress-deadline", "serving.knative.dev/progressDeadline")
_METRIC: Final = GROUP + "metric"
# A variable's value, and a word, once what they refer to stands in them: references double what they name each time.
_LONGEST_EXPANDED: Final = 4096
# In a container's words, as a kubelet reads them: a dollar, or the value of a variable.
_REFERENCE: Final = re.compile(r"\$\$|\$\(([^()]*)\)")
_KINDS: Final = {KPA: Kind.KPA, HPA: Kind.HPA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """What the template sets for its proxy by arguments, or by the environment."""

    model: str = ""
    container_concurrency: int = 0
    tls: bool = False
    ports: ProxyPorts = ProxyPorts(_REST_PORT, _GRPC_PORT, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Berth's own annotations. `until_needed`: idle replicas stay until their memory is needed."""

    limits: BufferLimits = BufferLimits()
    clients: frozenset[str] = frozenset()
    overflow_pods: int = 0
    until_needed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`annotations`: those of autoscaling that its spec was made from. `recorded`: the scaler's own annotation, as found."""

    key: ModelKey
    uid: str
    kind: Kind
    annotations: Mapping[str, str]
    spec: Spec
    options: Options
    proxy: Proxy
    public_name: str
    template: JsonObject = field(repr=False)
    template_hash: str
    # As JSON.
    template_bytes: int
    replicas: int = 0
    recorded: Scaled | None = None
    # Who wrote `replicas` last as an autoscaler does, and when.
    scaled_by: tuple[str, str] | None = None
    # So long a model may take to get ready before it is given up (Knative's annotation of a Revision).
    progress_deadline_ns: int = PROGRESS_DEADLINE_NS

    @property
    def class_name(self) -> str:
        return self.annotations[CLASS]

    @property
    def labels(self) -> Mapping[str, str]:
        """Of its pods."""
        return (self.template.get("metadata") or {}).get("labels") or {}

    @property
    def slots(self) -> int:
        """How many requests a replica accepts at once from activators."""
        return self.proxy.container_concurrency or max(math.ceil(min(2 * self.spec.target, 1e6)), 1)


def keep_deployment(item: JsonObject) -> dict[str, Any]:
    """What a mirror needs to keep of a Deployment."""
    kept = picked(item["metadata"], "name", "namespace", "uid", "resourceVersion", "annotations")
    kept["managedFields"] = [
        picked(one, "manager", "time", "subresource", "fieldsV1")
        for one in item["metadata"].get("managedFields") or ()
        if one.get("subresource") == _SCALE
    ]
    return {
        "metadata": kept,
        "spec": picked(item.get("spec") or {}, "replicas", "template"),
    }


def scaled_by(item: JsonObject) -> tuple[str, str] | None:
    """Who owns `replicas` by the subresource that autoscalers write (a HorizontalPodAutoscaler, and KEDA by one), and
    since when. What a person writes with kubectl is no autoscaler's."""
    for one in item["metadata"].get("managedFields") or ():
        manager = one.get("manager") or ""
        owned = ((one.get("fieldsV1") or {}).get("f:spec") or {}).keys()
        if one.get("subresource") == _SCALE and "f:replicas" in owned and not manager.startswith("kubectl"):
            return manager, one.get("time") or ""
    return None


def merged_annotations(template: JsonObject, own: Mapping[str, str], keys: Keys) -> dict[str, str]:
    """Autoscaling's and Berth's options, Knative's of a Revision, and nothing else."""
    of_template = (template.get("metadata") or {}).get("annotations") or {}
    names = [keys.overflow_pods, keys.hold_timeout, keys.hold_requests, keys.hold_bytes, keys.clients]
    names += _PROGRESS_DEADLINE
    return of_deployment(of_template, own) | picked(own, *names) | picked(of_template, *names)


def read_deployment(
    key: ModelKey,
    uid: str,
    annotations: Mapping[str, str],
    template: JsonObject,
    *,
    defaults: Defaults,
    keys: Keys,
) -> Deployment:
    """`annotations`: merged ones. Raises InvalidValue that names what is wrong and what would be right."""
    autoscaling = {name: text for name, text in annotations.items() if name.startswith(GROUP)}
    retention = Annotations(autoscaling).key(_RETENTION)
    until_needed = autoscaling.get(retention) == UNTIL_NEEDED
    if until_needed:
        del autoscaling[retention]
    kind = _KINDS.get(autoscaling[CLASS], Kind.EXTERNAL)
    if kind is Kind.EXTERNAL:  # Knative leaves open what a class that is not its own counts
        autoscaling[_METRIC] = autoscaling.get(_METRIC) or CONCURRENCY
    if (template.get("spec") or {}).get("hostNetwork"):
        raise InvalidValue("hostNetwork: a replica that is scaled needs an address of its own; leave it out")
    text = template_text(template)
    if len(text) > MOST_TEMPLATE_BYTES:
        raise InvalidValue(
            f"the pod template has {len(text)} bytes; a model that is scaled has {MOST_TEMPLATE_BYTES} at most"
        )
    proxy = read_proxy(template)
    return Deployment(
        key=key,
        uid=uid,
        kind=kind,
        annotations=autoscaling,
        spec=_spec(autoscaling, defaults, proxy, until_needed=until_needed),
        options=_options(annotations, keys, key.namespace, until_needed=until_needed),
        proxy=proxy,
        public_name=_public_name(proxy, template, keys) or key.name,
        template=template,
        template_hash=text_hash(text),
        template_bytes=len(text),
        progress_deadline_ns=_progress_deadline_ns(annotations),
    )


def template_text(template: JsonObject) -> str:
    """Canonical, of ASCII."""
    return json.dumps(template, sort_keys=True, separators=(",", ":"))


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_recorded(text: str | None) -> Scaled | None:
    """An editor of the Deployment can write anything there; it concerns that model alone."""
    try:
        return None if text is None else Scaled.from_text(text)
    except InvalidValue:
        return None


def _spec(given: Mapping[str, str], defaults: Defaults, proxy: Proxy, *, until_needed: bool) -> Spec:
    spec = spec_of(given, defaults, container_concurrency=proxy.container_concurrency)
    _check_finite(Annotations(given))
    if spec.target_burst_capacity != 0:
        name = Annotations(given).key("target-burst-capacity")
        raise InvalidValue(f"{name}: no activator is in the path while a replica is ready; use 0")
    if until_needed:
        return replace(spec, bounds=replace(spec.bounds, retention_ns=_FOR_EVER_NS))
    return spec


def _check_finite(given: Annotations) -> None:
    """Knative takes NaN for any number, and an infinite target: the model would never scale. Raises InvalidValue."""
    for name in NUMBERS:
        number = given.value(name)
        if number is not None and not math.isfinite(number):
            raise _wrong(given.key(name), given.text(name) or "", "a finite number")


def _progress_deadline_ns(given: Mapping[str, str]) -> int:
    for key in _PROGRESS_DEADLINE:
        if (text := given.get(key)) is not None:
            try:
                deadline_ns = parse_duration_ns(text)
            except InvalidValue:
                deadline_ns = 0
            if deadline_ns <= 0 or deadline_ns % SECOND_NS:
                raise _wrong(key, text, "a duration of whole seconds, more than 0s")
            return deadline_ns
    return PROGRESS_DEADLINE_NS


def _options(given: Mapping[str, str], keys: Keys, namespace: str, *, until_needed: bool) -> Options:
    usual = BufferLimits()
    limits = replace(
        usual,
        requests=_whole(given, keys.hold_requests, usual.requests, least=1, most=_MOST_REQUESTS),
        bytes=_bytes(given, keys.hold_bytes, usual.bytes),
        seconds=_seconds(given, keys.hold_timeout, usual.seconds),
    )
    return Options(
        limits=limits,
        clients=_clients(given, keys.clients, namespace),
        overflow_pods=_whole(given, keys.overflow_pods, 0, least=0, most=_MOST_OVERFLOW),
        until_needed=until_needed,
    )


def _whole(given: Mapping[str, str], key: str, usual: int, *, least: int, most: int) -> int:
    if (text := given.get(key)) is None:
        return usual
    try:
        value = parse_int(text)
    except InvalidValue:
        value = least - 1
    if not least <= value <= most:
        raise _wrong(key, text, f"a whole number, {least} to {most}")
    return value


def _bytes(given: Mapping[str, str], key: str, usual: int) -> int:
    if (text := given.get(key)) is None:
        return usual
    try:
        value = parse_bytes(text)
    except InvalidValue:
        value = 0
    if value <= 0:
        raise _wrong(key, text, "a quantity such as 64Mi")
    return value


def _seconds(given: Mapping[str, str], key: str, usual: float) -> float:
    """Seconds, or one of Go's durations."""
    if (text := given.get(key)) is None:
        return usual
    try:
        seconds = parse_duration_ns(text) / SECOND_NS if text[-1:] in ("s", "m", "h") else parse_float(text)
    except InvalidValue:
        seconds = math.nan
    if not 0 < seconds <= MOST_HOLD_SECONDS:
        raise _wrong(key, text, f"seconds, more than 0 and at most {MOST_HOLD_SECONDS:g}")
    return seconds


def _wrong(key: str, text: str, right: str) -> InvalidValue:
    return InvalidValue(f"{key}: {one_line(text, limit=80)!r} is invalid; use {right}")


def _clients(given: Mapping[str, str], key: str, namespace: str) -> frozenset[str]:
    """Its own namespace is always among them."""
    text = given.get(key, "")
    names = {part.strip() for part in text.split(",")} - {""}
    if len(names) > _MOST_CLIENTS or not all(map(_NAMESPACE.fullmatch, names)):
        raise _wrong(key, text, f"at most {_MOST_CLIENTS} namespaces, as in a,b, or * for all")
    return frozenset(names | {namespace})


# The template's proxy.


def read_proxy(template: JsonObject) -> Proxy:
    """A template without one has the proxy's default. Raises InvalidValue for a limit that is none."""
    found = _proxy_container(template.get("spec") or {})
    if found is None:
        return Proxy()
    container, given = found
    variables = _variables(container)
    flags = _flags([_expanded(word, variables, too_long=word) for word in given])
    return _proxy(flags, variables, container)


def _proxy_container(spec: JsonObject) -> tuple[JsonObject, Sequence[str]] | None:
    """With its flags. A container that runs `berth proxy`, before one that is only named so; main containers and native
    sidecars (init containers that are started again) alike."""
    sidecars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    every = [*(spec.get("containers") or ()), *sidecars]
    running = [(one, flags) for one in every if (flags := _proxy_flags(one)) is not None]
    called = [(one, _words(one)) for one in every if one.get("name") == _PROXY]
    of_both = [found for found in running if found[0].get("name") == _PROXY]
    return next(iter([*of_both, *running, *called]), None)


def _proxy_flags(container: JsonObject) -> Sequence[str] | None:
    """What stands behind `berth proxy`, or behind `proxy` where the image's own entrypoint is berth. Another program's
    `proxy` (Istio's is `proxy sidecar --…`) is followed by a word that is no flag."""
    words = _words(container)
    for place, word in enumerate(words):
        is_ours = not (place or container.get("command")) or words[place - 1].rpartition("/")[2] == "berth"
        if word == _PROXY and is_ours:
            flags = words[place + 1 :]
            return flags if not flags or flags[0].startswith("-") else None
    return None


def _words(container: JsonObject) -> list[str]:
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _variables(container: JsonObject) -> dict[str, str]:
    """What a template does not say itself, such as a value from a ConfigMap, stays a reference; so does what would be
    longer than any value that is read here."""
    variables: dict[str, str] = {}
    for one in container.get("env") or ():
        reference = f"$({one.get('name', '')})"
        variables[one.get("name", "")] = (
            reference
            if "valueFrom" in one
            else _expanded(one.get("value") or "", variables, too_long=reference)
        )
    return variables


def _expanded(text: str, variables: Mapping[str, str], *, too_long: str) -> str:
    """Who is not known stays as it stands; `too_long` in place of more than `_LONGEST_EXPANDED` characters.
    Source: k8s.io/kubernetes third_party/forked/golang/expansion."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else variables.get(found[1], found[0])

    # Before anything is put together: a word can name what is long thousands of times.
    length = len(text) + sum(len(value(found)) - len(found[0]) for found in _REFERENCE.finditer(text))
    return too_long if length > _LONGEST_EXPANDED else _REFERENCE.sub(value, text)


def _flags(words: Sequence[str]) -> dict[str, str]:
    """`--name=value` and `--name value`; the last one counts."""
    flags: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            flag, equals, flags_value = word[2:].partition("=")
            flags[flag] = flags_value
            name = None if equals else flag
        elif name is not None:
            flags[name], name = word, None
    return flags


def _proxy(flags: Mapping[str, str], variables: Mapping[str, str], container: JsonObject) -> Proxy:
    def said(flag: str) -> str:
        return flags.get(flag) or variables.get("BERTH_PROXY_" + flag.upper().replace("-", "_")) or ""

    limit = "container-concurrency"
    given = {f"--{limit}": said(limit)} if said(limit) else {}
    named = {one["name"]: one["containerPort"] for one in container.get("ports") or () if one.get("name")}
    return Proxy(
        model=said("model"),
        container_concurrency=_whole(given, f"--{limit}", 0, least=0, most=_MOST_REQUESTS),
        tls=bool(said("tls-cert")),
        ports=ProxyPorts(
            _port(said("http-listen"), _REST_PORT), _port(said("grpc-listen"), _GRPC_PORT), named
        ),
    )


def _port(listen: str, usual: int) -> int:
    text = listen.rpartition(":")[2]
    is_short = text.isascii() and text.isdigit() and len(text) <= _PORT_DIGITS
    return int(text) if is_short and 0 < int(text) < 65536 else usual


def _public_name(proxy: Proxy, template: JsonObject, keys: Keys) -> str:
    """Raises InvalidValue."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    name = proxy.model or annotations.get(keys.model_name) or annotations.get(keys.model_id) or ""
    if "$(" in name:
        raise InvalidValue(
            f"--model: what {one_line(name, limit=80)!r} is, the template does not say; write it"
        )
    if len(name) > _LONGEST_NAME:
        raise InvalidValue(f"the model's name has {len(name)} characters; {_LONGEST_NAME} at most are served")
    return name
