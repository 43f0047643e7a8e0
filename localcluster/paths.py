"""Where the local cluster keeps what outlives it."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$BERTH_CACHE`, else `$XDG_CACHE_HOME/berth`, else `~/.cache/berth`."""
    own = os.environ.get("BERTH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "berth"
