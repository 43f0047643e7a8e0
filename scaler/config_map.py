"""Knative's ConfigMap `config-autoscaler`, as a kubelet mounts it: a file for each key, read at the start and watched
from then on. It decides nothing; what a value means is `decision.defaults`'.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from berth.contract.errors import InvalidValue
from berth.contract.text import one_line
from berth.runtime.errors import ConfigError
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread, repeat
from scaler.decision.defaults import BERTH, KEYS, Defaults, read_defaults

log = logging.getLogger(__name__)

# A kubelet updates a changed ConfigMap in its pods within a minute or so.
_LOOK_SECONDS: Final = 5.0
# A kubelet exchanges all files at once by this link, so that what is read through it is of one ConfigMap.
_KUBELETS_LINK: Final = "..data"
_TRIES: Final = 5
# Characters of why a ConfigMap is rejected: a value of it has up to a million.
_LONGEST_TOLD: Final = 500
_OVERRIDDEN: Final = {
    "target-burst-capacity": "an activator is in the path only while no replica is ready; 0 holds instead",
}
_NO_EFFECT: Final = {
    "activator-capacity": "an activator's bounds are its own flags; the key has no effect",
    "pod-autoscaler-class": "a Deployment is scaled once it names a class itself; the key has no effect",
}


@dataclass(frozen=True, slots=True)
class ConfigMap:
    """`data`: its keys, over Berth's own defaults. `warnings`: what of it is not honoured, and where that stands."""

    data: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def defaults(self) -> Defaults:
        return read_defaults(self.data)


def read_config(directory: Path | None) -> ConfigMap:
    """Raises ConfigError that names the directory, the key, and what would be right."""
    if directory is None:
        return ConfigMap(BERTH)
    try:
        given = _mounted(directory)
        _check_numbers(read_defaults({**BERTH, **given}), given)
    except OSError as error:
        raise ConfigError(f"--config: {directory}: {error.strerror or error}") from error
    except (UnicodeError, InvalidValue) as error:
        text = one_line(str(error), limit=_LONGEST_TOLD)
        raise ConfigError(f"--config: {directory}: {text}") from error
    warnings = tuple(f"--config: {directory / key}: {why}" for key, why in _not_honoured(given))
    kept = {key: text for key, text in given.items() if key not in _OVERRIDDEN}
    return ConfigMap({**BERTH, **kept}, warnings)


def _mounted(directory: Path) -> dict[str, str]:
    """All keys of one ConfigMap: a kubelet removes the files of the one before once its link leads to the new ones, some
    of them perhaps before they were read here. Raises OSError and UnicodeError."""
    for _ in range(_TRIES):
        leads_to = _data(directory)
        try:
            found = dict(_files(leads_to))
        except FileNotFoundError:
            if _data(directory) == leads_to:
                raise
            continue
        if _data(directory) == leads_to:
            return found
    raise OSError("it is exchanged again and again")


def _data(directory: Path) -> Path:
    link = directory / _KUBELETS_LINK
    return directory / link.readlink() if link.is_symlink() else directory


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    """Hidden ones are the kubelet's, `_example` is Knative's. Raises OSError and UnicodeError."""
    for file in sorted(directory.iterdir()):
        if not file.name.startswith((".", "_")) and file.is_file():
            yield file.name, file.read_text(encoding="utf-8").strip()


def _check_numbers(defaults: Defaults, given: Mapping[str, str]) -> None:
    """Knative takes NaN for any number, and an infinite target: no model would ever scale by it. Raises InvalidValue."""
    for key in given.keys() & KEYS.keys():
        value = getattr(defaults, KEYS[key].field)
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and "target" in key)):
            raise InvalidValue(f"{key}: {one_line(given[key], limit=80)!r} is invalid; use a finite number")


def _not_honoured(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, text in given.items():
        if key in _OVERRIDDEN and text != BERTH[key]:
            yield key, f"{one_line(text, limit=80)!r} is not honoured: {_OVERRIDDEN[key]}"
        elif key in _NO_EFFECT:
            yield key, _NO_EFFECT[key]
        elif key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            yield key, "no such key; it has no effect" + (f"; did you mean {near[0]}?" if near else "")


class ConfigMapWatch:
    """`apply` is called with each ConfigMap that differs from the one before and can be read; a bad one changes nothing."""

    def __init__(
        self,
        directory: Path,
        current: ConfigMap,
        apply: Callable[[ConfigMap], None],
        refused: Callable[[bool], None] = lambda is_refused: None,
    ) -> None:
        """`refused` is called at each look with whether what is mounted now is bad."""
        self._directory, self._current, self._apply, self._refused = directory, current, apply, refused
        self._said = ""

    async def run(self) -> None:
        """For ever."""
        await repeat(self.step, name="config", interval_seconds=_LOOK_SECONDS)

    async def step(self) -> None:
        try:
            found = await in_thread(read_config, self._directory)
        except ConfigError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning(
                    "ConfigMap rejected; the last valid one stays in effect", extra=fields(error=error)
                )
            self._refused(True)
            return
        self._said = ""
        self._refused(False)
        if found != self._current:
            self._current = found
            log.info("ConfigMap applied", extra=fields(keys=len(found.data)))
            warn(found)
            self._apply(found)


def warn(config: ConfigMap) -> None:
    for warning in config.warnings:
        log.warning("a key of the ConfigMap is not honoured", extra=fields(warning=warning))
