"""What `berth loader` takes, and what it says to what it does not."""

import tempfile
from pathlib import Path

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import ConfigError
from berth.runtime.options import parse_options
from loader.config import LoaderOptions

DIGEST = "0123456789abcdef" * 4


def parse(*argv: str, **environ: str) -> LoaderOptions:
    argv = ("--model=resnet", "--agent=127.0.0.1:9000", *argv)
    return parse_options(LoaderOptions, process="loader", summary="s", argv=argv, environ=environ)


def test_what_is_not_said_has_a_default() -> None:
    options = parse()
    assert (options.model, options.agent) == ("resnet", Endpoint("127.0.0.1", 9000))
    assert (options.uri, options.model_src, options.token_file, options.sha256) == (None, None, None, None)
    assert options.work_dir == Path(tempfile.gettempdir())
    # An agent's pod is replaced within a minute or two; a download may be slow, but not stand still for ever.
    assert 60 <= options.agent_timeout <= 600
    assert 10 <= options.idle_timeout <= 600
    assert options.download_timeout == 6 * 3600
    assert options.max_download_bytes == 512 * 1024**3


def test_what_is_said_counts() -> None:
    options = parse("--uri=http://a/m.onnx", "--work-dir=/w", "--token-file=/t", "--model-src=/m")
    assert options.uri == "http://a/m.onnx"
    assert (options.work_dir, options.token_file, options.model_src) == (Path("/w"), Path("/t"), Path("/m"))
    assert parse(BERTH_LOADER_AGENT_TIMEOUT="1").agent_timeout == 1
    assert parse("--idle-timeout=1").idle_timeout == 1
    options = parse("--download-timeout=60", "--max-download-bytes=2Gi")
    assert (options.download_timeout, options.max_download_bytes) == (60, 2 * 1024**3)


def test_a_digest_in_capitals_is_the_same() -> None:
    assert parse(f"--sha256={DIGEST.upper()}").sha256 == DIGEST


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (f"--sha256={DIGEST[1:]}", "is not a SHA-256 in hexadecimal"),
        (f"--sha256={DIGEST}0", "is not a SHA-256 in hexadecimal"),
        (f"--sha256={DIGEST[1:]}g", "is not a SHA-256 in hexadecimal"),
        ("--model=../etc", "--model: model name '../etc' may hold only"),
        ("--agent=nowhere", "--agent: 'nowhere' is not HOST:PORT"),
        ("--agent-timeout=0.5", "--agent-timeout: '0.5' is out of range"),
        ("--idle-timeout=0.5", "--idle-timeout: '0.5' is out of range"),
        ("--download-timeout=0.5", "--download-timeout: '0.5' is out of range"),
        ("--max-download-bytes=1.5", "--max-download-bytes: '1.5' is not a whole number of bytes"),
    ],
)
def test_what_is_wrong_is_named(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(argument)


def test_without_a_model_or_an_agent_it_can_do_nothing() -> None:
    for argv in ([], ["--model=m"], ["--agent=a:1"]):
        with pytest.raises(ConfigError, match=r"--(agent|model) is required"):
            parse_options(LoaderOptions, process="loader", summary="s", argv=argv, environ={})
