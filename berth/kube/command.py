"""The parts that all user commands share: their options, and how text from the cluster is shown."""

import re
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from berth.contract.errors import InvalidValue
from berth.contract.text import LINE_LIMIT, one_line
from berth.kube.options import KubeOptions
from berth.runtime import options as opt

_PIPE_WIDTH = 1000
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(KubeOptions):
    """Where to read from and how to show it."""

    output: str = opt.option(
        "a table for people or JSON for programs",
        default="table",
        parse=opt.choice("table", "json"),
        metavar="table|json",
        short="-o",
    )
    log_level: str = opt.log_level("error")


def object_name(text: str) -> str:
    """Raises InvalidValue for what cannot be the name of an object."""
    if not _NAME.fullmatch(text):
        hint = "; the namespace goes with -n" if "/" in text else ""
        raise InvalidValue(f"{text[:253]!r} is not the name of an object in Kubernetes{hint}")
    return text


def console() -> Console:
    """Standard output: a terminal with its width, and a pipe or file with room for every word."""
    terminal = Console(soft_wrap=True)
    return terminal if terminal.is_terminal else Console(soft_wrap=True, width=_PIPE_WIDTH)


def plain(text: str, *, limit: int = LINE_LIMIT) -> Text:
    """Text from the cluster, made fit for a terminal."""
    return Text(one_line(text, limit=limit))
