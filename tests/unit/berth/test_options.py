"""Options of every process."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.kube.options import KubeOptions
from berth.runtime import options as opt
from berth.runtime.errors import ConfigError
from berth.runtime.options import CommonOptions, parse_options


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("text", ["inf", "infinity", "1e999", "-inf", "nan", "0.9", "-1"])
def test_a_number_is_finite_and_not_too_small(text: str) -> None:
    with pytest.raises(InvalidValue, match=rf"^'{text}' is out of range; at least 1 is expected$"):
        opt.number(minimum=1)(text)


def test_numbers_at_their_bounds() -> None:
    assert [opt.number(minimum=1)(text) for text in ("1", "2.5", "1e9")] == [1, 2.5, 1e9]
    with pytest.raises(InvalidValue, match="'ten' is not a number"):
        opt.number(minimum=1)("ten")


def test_integers_at_their_bounds() -> None:
    within = opt.integer(minimum=1, maximum=3)
    assert [within(text) for text in ("1", "3", " 2 ")] == [1, 3, 2]
    for text in ("0", "4", "-1"):
        with pytest.raises(InvalidValue, match=f"'{text}' is out of range; 1 to 3 is expected"):
            within(text)
    for text in ("1.0", "0x1", ""):
        with pytest.raises(InvalidValue, match=f"'{text}' is not an integer"):
            within(text)
    assert opt.integer()("0") == 0
    assert opt.integer()(str(2**40)) == 2**40
    for text in ("-1", str(10**30)):
        with pytest.raises(InvalidValue, match="is out of range"):
            opt.integer()(text)


@dataclass(frozen=True, kw_only=True)
class Flags(CommonOptions):
    file: str = opt.positional("the file", metavar="FILE")
    output: str | None = opt.option("where to", default=None, short="-o")
    share: float = opt.option("how much, in %", default=0.5, parse=opt.number(minimum=0), shown="half")
    dry_run: bool = opt.switch("only look", default=False)
    keep: bool = opt.switch("keep it", default=True)
    names: tuple[str, ...] = opt.option("who", default=("a", "b"), parse=opt.words)
    nobody: tuple[str, ...] = opt.option("no one", default=(), parse=opt.words)
    listen: Endpoint | None = opt.endpoint("where", default=None)
    peer: Endpoint = opt.endpoint("with whom", default="h:1")
    size: int = opt.option("how large", default=1024, parse=opt.byte_count, metavar="BYTES")


def parse(*argv: str, **environ: str) -> Flags:
    return parse_options(Flags, process="would-fit", summary="What it does.", argv=argv, environ=environ)


def test_every_kind_of_flag() -> None:
    said = parse(
        "f", "-o", "x", "--dry-run", "--no-keep", "--names=c,,c, d", "--listen=[::1]:2", "--size=1Ki"
    )
    assert (said.file, said.output, said.dry_run, said.keep) == ("f", "x", True, False)
    assert (said.names, said.listen, said.size) == (("c", "d"), Endpoint("::1", 2), 1024)
    default = parse("f")
    assert (default.output, default.dry_run, default.keep, default.listen) == (None, False, True, None)
    assert (default.names, default.peer) == (("a", "b"), Endpoint("h", 1))
    assert (default.log_format, default.log_level) == ("text", "info")
    assert parse("f", "--output=y").output == "y"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((yes, True) for yes in ("1", "TRUE", " yes", "on")),
        *((no, False) for no in ("0", "No", "off ", "false")),
    ],
)
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert parse("f", BERTH_WOULD_FIT_DRY_RUN=text).dry_run is value
    assert parse("f", BERTH_WOULD_FIT_KEEP=text).keep is value
    assert parse("f", "--dry-run", "--no-keep", BERTH_WOULD_FIT_DRY_RUN=text).dry_run is True


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, "the following arguments are required: FILE; see berth would-fit --help"),
        (["f"], {"BERTH_WOULD_FIT_KEEP": "y"}, r"--keep \(from BERTH_WOULD_FIT_KEEP\): 'y' is neither true"),
        (["f", "--log-level=trace"], {}, "'trace' is not one of debug, info, warning, error"),
        (["f", "--log-format=xml"], {}, "'xml' is not one of text, json"),
        (["f", "--size=1.5"], {}, "--size: '1.5' is not a whole number of bytes"),
        (["f", "--out=x"], {}, "unrecognized arguments: --out=x"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv, **environ)


def test_help_tells_every_flag_its_default_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: berth would-fit ")
    assert "What it does." in shown
    assert "Each flag can also be given as BERTH_WOULD_FIT_FLAG in the environment." in shown
    for part in (
        "FILE the file",
        "-o TEXT, --output TEXT where to (default none; BERTH_WOULD_FIT_OUTPUT)",
        "how much, in % (default half; BERTH_WOULD_FIT_SHARE)",
        "--dry-run, --no-dry-run only look (default no; BERTH_WOULD_FIT_DRY_RUN)",
        "--keep, --no-keep keep it (default yes; BERTH_WOULD_FIT_KEEP)",
        "who (default a,b; BERTH_WOULD_FIT_NAMES)",
        "no one (default none; BERTH_WOULD_FIT_NOBODY)",
        "--listen HOST:PORT where (default none; BERTH_WOULD_FIT_LISTEN)",
        "--peer HOST:PORT with whom (default h:1; BERTH_WOULD_FIT_PEER)",
        "--size BYTES how large (default 1024; BERTH_WOULD_FIT_SIZE)",
        "--log-format text|json how log lines look (default text; ",
        "--log-level debug|info|warning|error ",
    ):
        assert part in shown


def test_where_the_api_server_is_and_how_keys_begin() -> None:
    def kube(*argv: str) -> KubeOptions:
        return parse_options(KubeOptions, process="agent", summary="s", argv=argv, environ={})

    assert (kube().kubeconfig, kube().system_namespace, kube().key_prefix) == (None, "berth-system", Keys())
    said = kube("--kubeconfig=k", "--system-namespace=n", "--key-prefix=example.org/")
    assert (said.kubeconfig, said.system_namespace, said.key_prefix) == ("k", "n", Keys("example.org/"))
    with pytest.raises(ConfigError, match="--key-prefix: 'x' is not a key prefix"):
        kube("--key-prefix=x")


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    node_name: str = opt.option("the node")
    listen: Endpoint = opt.endpoint("where to listen", default="127.0.0.1:1")
    period: float = opt.seconds("how often", default=5.0, minimum=0.1)
    elect: bool = opt.switch("elect", default=True)
    names: tuple[str, ...] = opt.option("names", default=(), parse=opt.words)


def parsed(*argv: str, **environ: str) -> Options:
    return parse_options(Options, process="agent", summary="s", argv=argv, environ=environ)


def test_flag_beats_environment_beats_default() -> None:
    assert parsed("--node-name", "n").period == 5.0
    assert parsed("--node-name", "n", BERTH_AGENT_PERIOD="2").period == 2.0
    assert parsed("--node-name", "n", "--period", "3", BERTH_AGENT_PERIOD="2").period == 3.0


def test_switches_and_lists() -> None:
    assert parsed("--node-name", "n", "--no-elect").elect is False
    assert parsed("--node-name", "n", BERTH_AGENT_ELECT="off").elect is False
    assert parsed("--node-name", "n", "--names", "b, a,,a").names == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, r"--node-name is required \(or set BERTH_AGENT_NODE_NAME\)"),
        (["--node-name", "n", "--listen", "x"], {}, "--listen: 'x' is not HOST:PORT"),
        (["--node-name", "n", "--period", "0"], {}, "--period: '0' is out of range"),
        (["--node-name", "n", "--period", "nan"], {}, "--period: 'nan' is out of range"),
        (["--node-name", "n"], {"BERTH_AGENT_ELECT": "maybe"}, r"--elect \(from BERTH_AGENT_ELECT\)"),
        (["--node-name", "n", "--nod", "m"], {}, "unrecognized arguments: --nod"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(*argv, **environ)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--node-name" in shown
    assert "required; BERTH_AGENT_NODE_NAME" in shown
    assert "default 5 s; BERTH_AGENT_PERIOD" in shown
