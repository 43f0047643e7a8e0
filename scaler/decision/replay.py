"""The decider behind JSON lines, as `berth scaler --replay` reads them and `--record` writes them.

One object a line, its kind in `op`:

    {"op": "new", "id": M, "t": T, "ready": R, "config": {}, "annotations": {}, "containerConcurrency": 0,
     "unreachable": false, "scrape": false}
    {"op": "update", …}                 as new, of a model that there is
    {"op": "stat", "id": M, "t": T, "c": C, "pc": PC, "n": N, "pn": PN}
    {"op": "scale", "id": M, "t": T, "ready": R}
    {"op": "del", "id": M}

`t` is in seconds since 1970 and may have a fraction; what is left out is 0, empty or false. `config` is Knative's ConfigMap
`config-autoscaler`, with Knative's defaults. `scrape` says that the replicas' load is scraped, so that windows without
a value mean that nothing is known. A stat is the load of one second: average concurrency `c` and arrivals `n`, of which `pc`
and `pn` have been counted by who passed them on.

Each op but `stat` has one line of answer: `{}`; of scale `{"valid": …, "desired": …, "ebc": …, "in_panic": …}`, where an
answer that is not valid means that the last one stands; `{"err": "…"}` where it is refused, and nothing has changed then.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from berth.contract.errors import InvalidValue
from berth.contract.text import one_line
from scaler.decision.decider import Decision, ModelDecider
from scaler.decision.defaults import read_defaults
from scaler.decision.load import Stat
from scaler.decision.spec import Spec, spec_of
from scaler.go import INT32_MAX, SECOND_NS

OPS: Final = ("new", "update", "stat", "scale", "del")
# The year 2243: beyond, nanoseconds do not fit into Go's 64 bits.
_LATEST: Final = 2**33
_MOST_REQUESTS: Final = 2**31 - 1

Json = Mapping[str, Any]
Id = str | int


class BadLine(InvalidValue):
    """A line that is none of the above. `answered` is whether its op would have had an answer."""

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


class Replay:
    """Models by their ids, and nothing else."""

    def __init__(self) -> None:
        self._models: dict[Id, ModelDecider] = {}

    def answer(self, line: str) -> Json | None:
        """What one line is answered; None after a stat. Raises BadLine, which changes nothing."""
        asked = _read(line)
        op = asked["op"]
        try:
            name = _id(asked)
            if op == "stat":
                self._stat(name, asked)
                return None
            if op == "scale":
                return self._scale(name, asked)
            if op == "del":
                self._models.pop(name, None)
                return {}
            return self._configure(op, name, asked)
        except BadLine as error:
            error.answered = op != "stat"
            raise
        except InvalidValue as error:
            return {"err": str(error)}

    def _configure(self, op: str, name: Id, asked: Json) -> Json:
        now_ns, ready, spec = _now_ns(asked), _replicas(asked), _spec(asked)
        if op == "new":
            self._models[name] = ModelDecider(spec, ready=ready, now_ns=now_ns)
        else:
            self._model(name).update(spec, now_ns)
        return {}

    def _stat(self, name: Id, asked: Json) -> None:
        stat = Stat(*(_number(asked, key) for key in ("c", "pc", "n", "pn")))
        now_ns = _now_ns(asked)
        # The last words of one that has gone.
        if name in self._models:
            self._models[name].record(stat, now_ns)

    def _scale(self, name: Id, asked: Json) -> Json:
        model, now_ns, ready = self._model(name), _now_ns(asked), _replicas(asked)
        decision = model.decide(ready=ready, now_ns=now_ns)
        return answer_of(decision, in_panic=model.in_panic)

    def _model(self, name: Id) -> ModelDecider:
        if name not in self._models:
            raise InvalidValue(f"id: there is no {_shown(name)}; a line with op new makes it")
        return self._models[name]


def answer_of(decision: Decision | None, *, in_panic: bool) -> Json:
    """What a scale is answered."""
    if decision is None:
        return {"valid": False, "desired": 0, "ebc": 0, "in_panic": in_panic}
    return {
        "valid": True,
        "desired": decision.desired,
        "ebc": decision.excess_burst_capacity,
        "in_panic": in_panic,
    }


# --- what a recorder writes


def model_line(
    name: str,
    now_ns: int,
    *,
    is_new: bool,
    ready: int,
    config: Mapping[str, str],
    annotations: Mapping[str, str],
    container_concurrency: int,
    reachable: bool,
    scraped: bool,
) -> str:
    """A model that is new, or has other annotations. Those of others than the decider are left out by the caller."""
    return _line(
        op="new" if is_new else "update",
        id=name,
        t=_seconds(now_ns),
        ready=ready,
        config=dict(config),
        annotations=dict(annotations),
        containerConcurrency=container_concurrency,
        unreachable=not reachable,
        scrape=scraped,
    )


def stat_line(name: str, now_ns: int, stat: Stat) -> str:
    return _line(
        op="stat",
        id=name,
        t=_seconds(now_ns),
        c=stat.concurrency,
        pc=stat.proxied_concurrency,
        n=stat.requests,
        pn=stat.proxied_requests,
    )


def scale_line(name: str, now_ns: int, *, ready: int) -> str:
    return _line(op="scale", id=name, t=_seconds(now_ns), ready=ready)


def del_line(name: str) -> str:
    return _line(op="del", id=name)


def _line(**fields: object) -> str:
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _seconds(now_ns: int) -> int | float:
    """What a reader makes the same decisions of: a whole number where it is one, else to the nearest 0.2 µs."""
    return now_ns // SECOND_NS if now_ns % SECOND_NS == 0 else now_ns / SECOND_NS


# --- what a line holds


def _read(line: str) -> Json:
    try:
        asked = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"{one_line(line, limit=80)!r} is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise BadLine(f'{one_line(line, limit=80)!r} is not a JSON object; write {{"op": ...}}')
    if asked.get("op") not in OPS:
        raise BadLine(f"op: {_shown(asked.get('op'))} is none; write one of {', '.join(OPS)}")
    return asked


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


def _spec(asked: Json) -> Spec:
    """Raises BadLine for what is of the wrong kind, InvalidValue for values that are refused."""
    return spec_of(
        _texts(asked, "annotations"),
        read_defaults(_texts(asked, "config")),
        container_concurrency=_whole(asked, "containerConcurrency", _MOST_REQUESTS),
        reachable=not _truth(asked, "unreachable"),
        scraped=_truth(asked, "scrape"),
    )


def _now_ns(asked: Json) -> int:
    """Split first: as one float, a time of today has no nanoseconds left."""
    seconds = _number(asked, "t")
    if abs(seconds) > _LATEST:
        raise BadLine(f"t: {seconds:g} is not a time; write seconds since 1970")
    rest, whole = math.modf(seconds)
    return int(whole) * SECOND_NS + round(rest * SECOND_NS)


def _replicas(asked: Json) -> int:
    return _whole(asked, "ready", INT32_MAX)


def _whole(asked: Json, key: str, most: int) -> int:
    value = asked.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise BadLine(f"{key}: {_shown(value)} is invalid; use a whole number, 0 to {most}")
    return value


def _number(asked: Json, key: str) -> float:
    value = asked.get(key, 0)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise BadLine(f"{key}: {_shown(value)} is invalid; use a number")


def _truth(asked: Json, key: str) -> bool:
    value = asked.get(key, False)
    if not isinstance(value, bool):
        raise BadLine(f"{key}: {_shown(value)} is invalid; use true or false")
    return value


def _id(asked: Json) -> Id:
    value = asked.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadLine(f"id: {_shown(value)} is invalid; use a text or a whole number")
    return value


def _texts(asked: Json, key: str) -> dict[str, str]:
    value = asked.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadLine(f"{key}: {_shown(value)} is invalid; use an object of texts")
    for name, text in value.items():
        if not isinstance(text, str):
            raise BadLine(f"{key}: {one_line(name)}: {_shown(text)} is invalid; use a text, in quotes")
    return value


def _shown(value: object) -> str:
    return "nothing" if value is None else one_line(json.dumps(value), limit=80)
