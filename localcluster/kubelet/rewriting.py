"""Directories in place of mounts, and a pod's own address in place of its loopback.

A container's mountPath is not visible to a plain process, so wherever a command, an argument or an
environment value names it, the directory of the volume is put there instead. It counts as named
where it stands as a whole path or as the beginning of one; the longest mountPath wins. 127.0.0.1 is
the machine's, and would be the same in each pod: where it stands there, the pod's address takes its place.
"""

import re
from collections.abc import Mapping

# What may follow a path that ends here; `/` goes on below it. Before it: anything that is no part of a path.
_BEFORE, _AFTER = r"(?<![A-Za-z0-9_.\-/])", r"(?=$|[/,:;)\s'\"])"
_LOOPBACK = re.compile(r"(?<![\w.-])127\.0\.0\.1(?![\w-]|\.\w)", re.ASCII)


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
