"""Command-line options as a frozen dataclass: one field a flag, each with an environment variable.

`--node-name` of `berth agent` is the field `node_name` and the variable `BERTH_AGENT_NODE_NAME`.
A flag beats its variable, which beats the default. This is the only place that reads either.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from berth.contract.endpoint import Endpoint, parse_address
from berth.contract.errors import InvalidValue
from berth.runtime.errors import ConfigError

C = TypeVar("C")
Parser = Callable[[str], Any]

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def option(
    help: str,
    *,
    default: Any = MISSING,
    parse: Parser = str,
    metavar: str = "TEXT",
    shown: str | None = None,
    short: str | None = None,
) -> Any:
    """A field that is a flag. Without a default it is required. `shown` is the default as --help shows
    it, `short` a one-letter form such as `-o`."""
    metadata = {"help": help, "parse": parse, "metavar": metavar, "shown": shown, "short": short}
    return dataclasses.field(default=default, metadata=metadata)


def positional(help: str, *, metavar: str, parse: Parser = str) -> Any:
    """A required argument without a flag. It has no environment variable."""
    metadata = {"help": help, "parse": parse, "metavar": metavar, "positional": True}
    return dataclasses.field(metadata=metadata)


def switch(help: str, *, default: bool) -> Any:
    """A boolean flag with a `--no-` form."""
    return dataclasses.field(default=default, metadata={"help": help, "parse": _boolean, "switch": True})


def endpoint(help: str, *, default: str | None = None, required: bool = False) -> Any:
    value = MISSING if required else None if default is None else Endpoint.parse(default)
    return option(help, default=value, parse=Endpoint.parse, metavar="HOST:PORT", shown=default)


def address(help: str, *, default: str | None = None) -> Any:
    """HOST:PORT or unix:PATH."""
    value = None if default is None else parse_address(default)
    return option(help, default=value, parse=parse_address, metavar="HOST:PORT|unix:PATH", shown=default)


def seconds(help: str, *, default: float, minimum: float = 0.0) -> Any:
    return option(
        help, default=default, parse=number(minimum=minimum), metavar="SECONDS", shown=f"{default:g} s"
    )


def number(*, minimum: float) -> Parser:
    """A parser of finite decimal numbers from `minimum` on."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise InvalidValue(f"{text!r} is not a number") from None
        if not minimum <= value < float("inf"):
            raise InvalidValue(f"{text!r} is out of range; at least {minimum:g} is expected")
        return value

    return parse


def integer(*, minimum: int = 0, maximum: int = 2**53) -> Parser:
    """A parser of integers within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text, 10)
        except ValueError:
            raise InvalidValue(f"{text!r} is not an integer") from None
        if not minimum <= value <= maximum:
            raise InvalidValue(f"{text!r} is out of range; {minimum} to {maximum} is expected")
        return value

    return parse


def percentage(text: str) -> float:
    """A share, 0 to 1, written as `15%`."""
    digits = text.removesuffix("%")
    if not (text.endswith("%") and digits.isascii() and digits.isdigit() and int(digits) < 100):
        raise InvalidValue(f"{text!r} is not a percentage; write 0% to 99%")
    return int(digits) / 100


def origin(text: str) -> str:
    """A parser of `http://HOST:PORT`, brackets around IPv6 alone: Go's clients follow no one to `http://[10.0.0.7]:8481`."""
    scheme, separator, address = text.removesuffix("/").partition("://")
    if not separator or scheme != "http":
        raise InvalidValue(f"{text!r} is not http://HOST:PORT")
    return f"http://{Endpoint.parse(address)}"


def choice(*allowed: str) -> Parser:
    """A parser that takes one of a few words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise InvalidValue(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


def words(text: str) -> tuple[str, ...]:
    """A comma list without empty entries, sorted, each once."""
    return tuple(sorted({word.strip() for word in text.split(",") if word.strip()}))


def byte_count(text: str) -> int:
    """A parser of quantities of bytes."""
    # Imported here: it needs exact fractions, and a process without such a flag does not pay for them.
    from berth.contract.quantity import parse_bytes

    return parse_bytes(text)


def log_level(default: str) -> Any:
    """The flag `--log-level`."""
    levels = ("debug", "info", "warning", "error")
    return option(
        "the least severe lines that are logged",
        default=default,
        parse=choice(*levels),
        metavar="|".join(levels),
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every process takes."""

    log_format: str = option(
        "how log lines look", default="text", parse=choice("text", "json"), metavar="text|json"
    )
    log_level: str = log_level("info")


def parse_options(
    cls: type[C], *, process: str, summary: str, argv: Sequence[str], environ: Mapping[str, str]
) -> C:
    """Build `cls` from flags, environment and defaults. Raises ConfigError naming the flag."""
    parser = _parser(cls, process=process, summary=summary)
    given = vars(parser.parse_args(list(argv)))
    return cls(**{field.name: _value(field, given, process, environ) for field in _fields(cls)})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(process: str, name: str) -> str:
    return f"BERTH_{process}_{name}".upper().replace("-", "_")


class _Parser(argparse.ArgumentParser):
    """Asks how wide the terminal is when it is to write on it: argparse would import compressors for each flag."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, formatter_class=partial(argparse.HelpFormatter, width=80))

    def format_help(self) -> str:
        self.formatter_class = argparse.HelpFormatter
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(cls: type[Any], *, process: str, summary: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"berth {process}",
        description=summary,
        allow_abbrev=False,
        epilog=f"Each flag can also be given as {variable(process, 'flag')} in the environment.",
    )
    for field in _fields(cls):
        _add_argument(parser, field, process)
    return parser


def _add_argument(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", process: str) -> None:
    metadata = field.metadata
    if metadata.get("positional"):
        parser.add_argument(field.name, metavar=metadata["metavar"], help=metadata["help"])
        return
    names = [name for name in (metadata.get("short"), flag(field.name)) if name]
    kind: dict[str, Any] = (
        {"action": argparse.BooleanOptionalAction}
        if metadata.get("switch")
        else {"metavar": metadata["metavar"]}
    )
    parser.add_argument(*names, dest=field.name, default=None, help=_help(field, process), **kind)


def _fields(cls: type[Any]) -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(cls) if "parse" in field.metadata]


def _help(field: "dataclasses.Field[Any]", process: str) -> str:
    shown = field.metadata.get("shown")
    if shown is None and field.default is not MISSING:
        shown = _shown(field.default)
    default = "required" if field.default is MISSING else f"default {shown}"
    return f"{field.metadata['help']} ({default}; {variable(process, field.name)})".replace("%", "%%")


def _shown(value: object) -> str:
    if value is None or value == () or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _value(
    field: "dataclasses.Field[Any]", given: Mapping[str, Any], process: str, environ: Mapping[str, str]
) -> Any:
    name = variable(process, field.name)
    source = field.metadata["metavar"] if field.metadata.get("positional") else flag(field.name)
    text = given[field.name]
    if text is None and name in environ:
        source, text = f"{source} (from {name})", environ[name]
    if isinstance(text, bool):
        return text
    if text is not None:
        try:
            return field.metadata["parse"](text)
        except InvalidValue as error:
            raise ConfigError(f"{source}: {error}") from error
    if field.default is MISSING:
        raise ConfigError(f"{source} is required (or set {name})")
    return field.default


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise InvalidValue(f"{text!r} is neither true nor false")
    return word in _TRUE
