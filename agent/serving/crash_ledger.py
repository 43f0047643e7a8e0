"""Which models may have crashed Triton: the marks of loads under way, the suspects, and what is quarantined. Pure.

A mark is made before a load and taken away after it. Marks that are open when Triton dies make suspects,
which are loaded one at a time from then on. Only what was alone in its load when Triton died, with no
unload beside it, is quarantined, and only if it was suspect before: a Triton that is stopped in the
middle of a load has not been killed by it. Each death while nothing was being loaded, or with requests in
Triton, by the gateway's report, shows that it has other causes of death, and one more death is needed.
What was open when this agent started is suspect and never more: how Triton has ended, if it has, is
unknown.

Files have no one owner: two namespaces may have the same. A death speaks against files for all of them only where
nothing else could have killed Triton: not where another model with code has been in it, which may have done it at
a moment of its choice, nor where requests were. Otherwise it counts for the namespace that loaded them.
"""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from berth.contract import wire
from berth.contract.errors import InvalidValue
from berth.contract.ids import ServerName
from berth.contract.wire import Count
from berth.kube.times import rfc3339

QUARANTINE = timedelta(hours=24)
LIFT_ALL = "all"
LEAST_BEGINNING = 8
# Of each kind the newest are kept, so that no tenant can make the journal large.
MOST_ENTRIES = 256
_MOST_CHARACTERS = 1024 * 1024
_VERSION = 1
# Deaths that make a suspect a culprit, the last one of a load that was alone.
_DEATHS = 2
_IDLE_DEATHS_COUNT = timedelta(minutes=30)
_MOST_IDLE_DEATHS = 3
_ENOUGH_CODE = 2
# For a journal of an agent that did not write it: one model without an owner.
_UNKNOWN_CODE = (ServerName(""),)
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class Mark(msgspec.Struct, frozen=True):
    """Files whose load is under way (`open`), or was when Triton died `deaths` times."""

    digest: str
    backend: str
    name: ServerName = msgspec.field(name="model")
    open: bool
    deaths: Count
    at: _Time
    # An agent before this one has written neither of these.
    namespace: str = ""
    # Of one death at least another may be the cause: they count for its namespace alone.
    is_doubted: bool = msgspec.field(default=False, name="doubted")
    # Made by an agent before this one. Not on disk.
    inherited: bool = False

    @property
    def key(self) -> "Key":
        return (self.digest, self.name)

    def died(self, *, is_doubted: bool) -> "Mark":
        """Triton has, with it open."""
        return replace(self, open=False, deaths=self.deaths + 1, is_doubted=self.is_doubted or is_doubted)

    def counts_for(self, digest: str, namespace: str) -> bool:
        return self.digest == digest and (self.namespace == namespace or not self.is_doubted)


# Two pods of one node may have the same files.
Key = tuple[str, ServerName]


class Quarantined(msgspec.Struct, frozen=True):
    """Files that are not loaded any more, on the version of Triton that they have killed."""

    digest: str
    triton: str
    backend: str
    name: ServerName = msgspec.field(name="model")
    at: _Time
    until: _Time
    # Whose files are not loaded any more; empty: everybody's.
    namespace: str = ""

    @property
    def key(self) -> "tuple[str, str, str]":
        return (self.digest, self.triton, self.namespace)

    def reason(self, lift: str) -> str:
        """For people. `lift`: the node annotation that ends it."""
        short = self.digest[:12]
        for_whom = f" for namespace {self.namespace}" if self.namespace else ""
        with_backend = f" with backend {self.backend}" if self.backend else ""
        return (
            f"quarantined: the files {short} took Triton {self.triton}{with_backend} down while they were "
            f"loaded alone at {rfc3339(self.at)}; not loaded on this node{for_whom} until {rfc3339(self.until)}; "
            f"to lift it, set the annotation {lift}={short} on the Node"
        )


class CrashLedger:
    """In memory; `encode` gives what has to be on disk before a load begins."""

    def __init__(
        self,
        marks: Iterable[Mark] = (),
        quarantined: Iterable[Quarantined] = (),
        idle_deaths: Iterable[datetime] = (),
        code: Iterable[ServerName] = (),
    ) -> None:
        self._marks = {mark.key: replace(mark, inherited=True) for mark in marks}
        self._quarantined = {one.key: one for one in quarantined}
        self._idle_deaths = list(idle_deaths)
        # Models with code that have been in this Triton, also those that are gone: of two it is enough to know
        # that for any model there was another one.
        self._code = set(code)

    def begin(
        self,
        digest: str,
        *,
        backend: str,
        name: ServerName,
        now: datetime,
        namespace: str = "",
        has_code: bool = False,
    ) -> None:
        """A load is about to begin."""
        self._forget(now)
        if has_code and len(self._code) < _ENOUGH_CODE:
            self._code.add(name)
        before = [mark for mark in self._marks.values() if mark.counts_for(digest, namespace)]
        self._marks.pop((digest, name), None)  # the newest is last
        self._marks[digest, name] = Mark(
            digest,
            backend,
            name,
            open=True,
            deaths=max((mark.deaths for mark in before), default=0),
            at=now,
            namespace=namespace,
            is_doubted=any(mark.is_doubted for mark in before),
        )

    def clear(self, digest: str, name: ServerName) -> bool:
        """The load is over and Triton lives. False if there was no mark."""
        return self._marks.pop((digest, name), None) is not None

    def is_open(self, digest: str, name: ServerName) -> bool:
        mark = self._marks.get((digest, name))
        return mark is not None and mark.open

    @property
    def open(self) -> list[Mark]:
        return [mark for mark in self._marks.values() if mark.open]

    def is_suspect(self, digest: str, namespace: str = "") -> bool:
        return any(mark.deaths > 0 and mark.counts_for(digest, namespace) for mark in self._marks.values())

    def inherit(self, loaded: Collection[ServerName], *, remembers: bool) -> None:
        """What became of the loads that an agent before has left open. `loaded`: what Triton has, or is at;
        `remembers`: Triton knows of any model at all, so it has not restarted since."""
        for mark in [mark for mark in self.open if mark.inherited and mark.name not in loaded]:
            if remembers:
                self.clear(*mark.key)
            else:
                self._marks[mark.key] = mark.died(is_doubted=True)

    def died(
        self,
        *,
        triton: str,
        now: datetime,
        was_unloading: bool = False,
        had_requests: bool = False,
    ) -> Quarantined | None:
        """Triton has died with the loads open that are marked so. The culprit, if it is known now: not
        where Triton was unloading as well, for a model can kill it by its end. Where requests were in it as
        well, it may have died of these: one more crash is needed."""
        try:
            return self._charge(triton, now, was_unloading=was_unloading, had_requests=had_requests)
        finally:
            self._code.clear()  # what it has left behind has ended with Triton's container

    def _charge(
        self, triton: str, now: datetime, *, was_unloading: bool, had_requests: bool
    ) -> Quarantined | None:
        opened = self.open
        if had_requests or not opened:
            self._idle_deaths = [*self._recent(now), now][-_MOST_IDLE_DEATHS:]
        if not opened:
            return None
        for mark in opened:
            is_doubted = had_requests or bool(self._code - {mark.name})
            self._marks[mark.key] = mark.died(is_doubted=is_doubted)
        if len(opened) > 1 or opened[0].inherited or was_unloading:
            return None
        mark = self._marks[opened[0].key]
        if mark.deaths < _DEATHS + len(self._recent(now)):
            return None
        del self._marks[mark.key]
        whose = mark.namespace if mark.is_doubted else ""
        one = Quarantined(mark.digest, triton, mark.backend, mark.name, now, now + QUARANTINE, whose)
        self._quarantined[one.key] = one
        return one

    def restarted(self) -> None:
        """Triton was restarted on purpose: no model is charged with it."""
        self._code.clear()
        closed = (replace(mark, open=False) for mark in self._marks.values())
        self._marks = {mark.key: mark for mark in closed if mark.deaths}

    def quarantined(
        self, digest: str, triton: str, now: datetime, *, namespace: str = ""
    ) -> Quarantined | None:
        """Whether these files are, for pods of this namespace."""
        found = (self._quarantined.get((digest, triton, whose)) for whose in ("", namespace))
        return next((one for one in found if one is not None and _is_on(one, now)), None)

    def all_quarantined(self, now: datetime) -> list[Quarantined]:
        return [one for one in self._quarantined.values() if _is_on(one, now)]

    def lift(self, request: str, now: datetime) -> list[Quarantined]:
        """End what the request names: a comma list of beginnings of digests, or `all`. What was ended. Raises
        InvalidValue, with nothing ended, where a beginning is too short to be meant."""
        words = [word.strip() for word in request.split(",") if word.strip()]
        short = [word for word in words if word != LIFT_ALL and len(word) < LEAST_BEGINNING]
        if short:
            raise InvalidValue(
                f"{short[0]!r} is too short; write at least {LEAST_BEGINNING} characters of a digest, or all"
            )
        ended = [
            one
            for one in self.all_quarantined(now)
            if any(word == LIFT_ALL or one.digest.startswith(word) for word in words)
        ]
        for one in ended:
            del self._quarantined[one.key]
        return ended

    def encode(self, now: datetime) -> dict[str, Any]:
        """As JSON, bounded."""
        marks = [m for m in self._marks.values() if m.open or now - m.at < QUARANTINE][-MOST_ENTRIES:]
        quarantined = self._newest_quarantined(now)
        return {
            "v": _VERSION,
            "marks": [_plain(mark) for mark in marks],
            "quarantined": [_plain(one) for one in quarantined],
            "idleDeaths": [{"at": rfc3339(at)} for at in self._idle_deaths],
            "code": sorted(self._code),
        }

    @classmethod
    def decode(cls, text: str) -> "CrashLedger":
        """Raises InvalidValue."""
        data = wire.parse(text, what="journal", limit=_MOST_CHARACTERS)
        wire.check_version(data, _VERSION, what="journal")
        read = wire.convert(data, _Journal, what="journal")
        return cls(read.marks, read.quarantined, [death.at for death in read.idle_deaths], read.code)

    def _forget(self, now: datetime) -> None:
        """As on disk, so in memory: what is open, and of the rest the newest while they last."""
        closed = [mark for mark in self._marks.values() if not mark.open]
        kept = {mark.key for mark in closed[-MOST_ENTRIES:] if now - mark.at < QUARANTINE}
        self._marks = {key: mark for key, mark in self._marks.items() if mark.open or key in kept}
        self._quarantined = {one.key: one for one in self._newest_quarantined(now)}

    def _newest_quarantined(self, now: datetime) -> list[Quarantined]:
        return sorted(self.all_quarantined(now), key=lambda one: one.at)[-MOST_ENTRIES:]

    def _recent(self, now: datetime) -> list[datetime]:
        return [at for at in self._idle_deaths if timedelta() <= now - at < _IDLE_DEATHS_COUNT]


class _Death(msgspec.Struct):
    at: _Time


class _Journal(msgspec.Struct, rename="camel"):
    marks: list[Mark]
    quarantined: list[Quarantined]
    idle_deaths: list[_Death]
    code: tuple[ServerName, ...] = _UNKNOWN_CODE


def _plain(one: Mark | Quarantined) -> dict[str, Any]:
    data = msgspec.to_builtins(one, builtin_types=(datetime,))
    data.pop("inherited", None)
    return {key: rfc3339(value) if isinstance(value, datetime) else value for key, value in data.items()}


def _is_on(one: Quarantined, now: datetime) -> bool:
    """Also where the clock has been set back, it ends after its time."""
    return now < one.until and now >= one.at - QUARANTINE
