"""KEDA's own client of external scalers as a program that is asked by lines, built once from KEDA's Go module."""

from pathlib import Path
from typing import Final

from bench.builds import go_build, kept, key_of

_MODULE: Final = Path(__file__).parent / "kedaclient"


def keda_client() -> Path:
    """kedaclient/main.go. Raises BuildFailed."""
    key = key_of(*(_MODULE / name for name in ("go.mod", "go.sum", "main.go")))
    return kept("kedaclient", key, lambda to: go_build(".", to, _MODULE))
