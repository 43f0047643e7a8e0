"""Directories in place of mounts, a pod's own address in place of its loopback, and Services' addresses for names.

A container's mountPath is not visible to a plain process, so wherever a command, an argument or an
environment value names it, the directory of the volume is put there instead. It counts as named
where it stands as a whole path or as the beginning of one; the longest mountPath wins. 127.0.0.1 is
the machine's, and would be the same in each pod: where it stands there, the pod's address takes its place.
A cluster's DNS is no part of the machine: a Service's name becomes its address before a program can ask.
"""

import re
from collections.abc import Callable, Mapping

# What may follow a path that ends here; `/` goes on below it. Before it: anything that is no part of a path.
_BEFORE, _AFTER = r"(?<![A-Za-z0-9_.\-/])", r"(?=$|[/,:;)\s'\"])"
_LOOPBACK = re.compile(r"(?<![\w.-])127\.0\.0\.1(?![\w-]|\.\w)", re.ASCII)
_SERVICE = re.compile(
    r"(?<![\w.-])([a-z0-9-]+)\.([a-z0-9-]+)(?:\.svc(?:\.cluster\.local)?)?(?![\w-]|\.\w)", re.ASCII
)


def rewrite(text: str, directories: Mapping[str, str]) -> str:
    """Replace each mountPath (a key) by its directory (the value)."""
    if not directories:
        return text
    longest_first = sorted(directories, key=len, reverse=True)
    pattern = _BEFORE + "(" + "|".join(re.escape(path) for path in longest_first) + ")" + _AFTER
    return re.sub(pattern, lambda match: directories[match[1]], text)


def own_loopback(text: str, address: str) -> str:
    """Replace 127.0.0.1 by the pod's address."""
    return _LOOPBACK.sub(address, text)


def service_names(text: str, address: Callable[[str, str], str]) -> str:
    """Replace NAME.NAMESPACE, with or without .svc, by what `address(namespace, name)` says; where that raises LookupError it stays."""

    def found(match: re.Match[str]) -> str:
        try:
            return address(match[2], match[1])
        except LookupError:
            return match[0]

    return _SERVICE.sub(found, text)
