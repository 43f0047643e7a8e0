"""The proxy's command line."""

from pathlib import Path

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.contract.quantity import parse_bytes
from berth.runtime.errors import ConfigError
from berth.runtime.options import parse_options
from proxy.config import ProxyOptions
from proxy.gateway.config import GatewayOptions
from proxy.request.replica import queue_depth
from proxy.sidecar.agent import UNLOAD_SECONDS


def parsed(*argv: str) -> ProxyOptions:
    return parse_options(ProxyOptions, process="proxy", summary="", argv=["--model", "m", *argv], environ={})


def test_a_model_is_all_that_is_required() -> None:
    """The documented defaults."""
    assert parsed() == ProxyOptions(
        model=ModelName("m"),
        triton_http=None,
        triton_grpc=None,
        http_listen=Endpoint("0.0.0.0", 9000),
        grpc_listen=Endpoint("0.0.0.0", 9001),
        admin_listen=Endpoint("0.0.0.0", 9090),
        container_concurrency=0,
        queue_depth=None,
        request_timeout=300.0,
        drain_delay=5.0,
        drain_timeout=15.0,
        agent=None,
        token_file=None,
        workers=1,
        tls_cert=None,
        tls_key=None,
        tls_client_ca=None,
        max_json_bytes=16 * 1024**2,
    )
    with pytest.raises(ConfigError, match="--model"):
        parse_options(ProxyOptions, process="proxy", summary="", argv=[], environ={})


def test_flags_arrive_as_what_they_mean() -> None:
    options = parsed(
        *("--triton-http", "127.0.0.1:8000", "--triton-grpc", "[::1]:8001", "--agent", "node:9"),
        *("--token-file", "/t", "--tls-cert", "/c", "--tls-key", "/k", "--tls-client-ca", "/a"),
        *("--max-json-bytes", "1Mi"),
    )
    assert (options.triton_http, options.triton_grpc) == (Endpoint("127.0.0.1", 8000), Endpoint("::1", 8001))
    assert options.agent == Endpoint("node", 9)
    files = (options.token_file, options.tls_cert, options.tls_key, options.tls_client_ca)
    assert files == (Path("/t"), Path("/c"), Path("/k"), Path("/a"))
    assert options.max_json_bytes == 1024**2


@pytest.mark.parametrize(
    ("flag", "most", "least"),
    [
        ("--container-concurrency", "1000000", "0"),
        ("--queue-depth", "10000000", "0"),
        ("--workers", "64", "1"),
        ("--triton-rest-requests", "1000000", "64"),
    ],
)
def test_numbers_have_bounds(flag: str, most: str, least: str) -> None:
    for text in (most, least):
        assert parsed(flag, text)
    for text in (str(int(most) + 1), str(int(least) - 1), "1.5", "many"):
        with pytest.raises(ConfigError, match=flag):
            parsed(flag, text)


def test_a_gateways_numbers_have_the_same_bounds() -> None:
    def taken(text: str) -> int:
        argv = ["--triton-rest-requests", text]
        options = parse_options(GatewayOptions, process="gateway", summary="", argv=argv, environ={})
        return options.triton_rest_requests

    assert [taken("64"), taken("1000000")] == [64, 1_000_000]
    for text in ("63", "1000001"):
        with pytest.raises(ConfigError, match="--triton-rest-requests"):
            taken(text)


def test_a_request_must_have_some_time() -> None:
    assert parsed("--request-timeout", "0.1", "--drain-delay", "0", "--drain-timeout", "0")
    for text in ("0", "0.09", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match="--request-timeout"):
            parsed("--request-timeout", text)


@pytest.mark.parametrize(
    ("argv", "waiting"),
    [
        ((), 1000),
        (("--queue-depth", "0"), 0),
        (("--container-concurrency", "7"), 70),
        (("--container-concurrency", "7", "--queue-depth", "0"), 0),
        (("--container-concurrency", "7", "--queue-depth", "3"), 3),
    ],
)
def test_so_many_may_wait(argv: tuple[str, ...], waiting: int) -> None:
    assert queue_depth(parsed(*argv).limits) == waiting


def test_help_tells_the_defaults_that_are_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "may wait, for one that ends or for memory (default 10 x container-concurrency, 1000 where that is 0"
        in told
    )
    assert (
        parse_bytes(told.partition("may unpack to (default ")[2].partition(";")[0]) == parsed().max_json_bytes
    )


def test_an_end_fits_a_pods_grace_period() -> None:
    """Kubernetes gives 30 s unless a pod says another number."""
    assert parsed().drain_delay + parsed().drain_timeout + UNLOAD_SECONDS < 30
