"""What a client may do: every route and RPC of Triton with its verdict. Default deny.

Routes are those of server/src/http_server.cc (`HTTPAPIServer::Handle`), RPCs those of
grpc_service.proto; a test holds the RPC table against the descriptor, so that a new one is noticed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What is done with a request."""

    LOCAL = "local"  # answered here
    ALLOW = "allow"  # forwarded, if it names the own model; another tenant's is hidden
    FILTER = "filter"  # forwarded, and the answer reduced to the own model
    BLOCK = "block"  # refused: it reaches other models or the server
    DENY = "deny"  # there is no such thing here


class Route(Enum):
    """The routes that are not blocked."""

    LIVE = "live"
    READY = "ready"
    SERVER = "server metadata"
    MODEL = "model metadata"
    MODEL_READY = "model ready"
    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate stream"
    CONFIG = "config"
    STATS = "stats"
    ALL_STATS = "all stats"
    INDEX = "index"
    BLOCKED = "blocked"


# What requests inference: it takes a slot, and has a body.
COUNTED = frozenset({Route.INFER, Route.GENERATE, Route.GENERATE_STREAM})


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the REST table."""

    methods: tuple[str, ...]
    pattern: re.Pattern[str]
    verdict: Verdict
    route: Route


# A name as it may stand in a path. Encoded characters, `..` and `//` match nothing and are denied.
_NAME = r"(?P<model>[A-Za-z0-9._~:@!$&'()*+,;=-]+)"
_VERSION = r"(?:/versions/(?P<version>[0-9]{1,18}))?"
_MODEL = rf"/v2/models/{_NAME}{_VERSION}"
_ANY = r"[A-Za-z0-9._~:@!$&'()*+,;=%-]+"


def _rule(methods: str, pattern: str, verdict: Verdict, route: Route) -> Rule:
    return Rule(tuple(methods.split()), re.compile(pattern, re.ASCII), verdict, route)


REST_RULES: tuple[Rule, ...] = (
    _rule("GET", r"/v2/health/live", Verdict.LOCAL, Route.LIVE),
    _rule("GET", r"/v2/health/ready", Verdict.LOCAL, Route.READY),
    _rule("GET", r"/v2", Verdict.FILTER, Route.SERVER),
    # Before the model routes, as in Triton: it lists the statistics of every model.
    _rule("GET", r"/v2/models/stats", Verdict.FILTER, Route.ALL_STATS),
    _rule("GET", _MODEL, Verdict.ALLOW, Route.MODEL),
    _rule("GET", _MODEL + "/ready", Verdict.ALLOW, Route.MODEL_READY),
    _rule("POST", _MODEL + "/infer", Verdict.ALLOW, Route.INFER),
    _rule("POST", _MODEL + "/generate", Verdict.ALLOW, Route.GENERATE),
    _rule("POST", _MODEL + "/generate_stream", Verdict.ALLOW, Route.GENERATE_STREAM),
    _rule("GET", _MODEL + "/config", Verdict.ALLOW, Route.CONFIG),
    _rule("GET", _MODEL + "/stats", Verdict.ALLOW, Route.STATS),
    # Triton ignores a repository's name here and lists every model; the own rows are made here.
    _rule("POST", rf"/v2/repository/(?:{_ANY}/)?index", Verdict.LOCAL, Route.INDEX),
    _rule("GET POST", rf"/v2/models/{_ANY}/trace/setting", Verdict.BLOCK, Route.BLOCKED),
    _rule("GET POST", r"/v2/trace/setting", Verdict.BLOCK, Route.BLOCKED),
    _rule("GET POST", r"/v2/logging", Verdict.BLOCK, Route.BLOCKED),
    _rule("POST", rf"/v2/repository/(?:{_ANY}/)?models/{_ANY}/(?:load|unload)", Verdict.BLOCK, Route.BLOCKED),
    _rule("GET", rf"/v2/(?:system|cuda)sharedmemory(?:/region/{_ANY})?/status", Verdict.BLOCK, Route.BLOCKED),
    _rule("POST", rf"/v2/(?:system|cuda)sharedmemory/region/{_ANY}/register", Verdict.BLOCK, Route.BLOCKED),
    _rule(
        "POST",
        rf"/v2/(?:system|cuda)sharedmemory(?:/region/{_ANY})?/unregister",
        Verdict.BLOCK,
        Route.BLOCKED,
    ),
)


@dataclass(frozen=True, slots=True)
class RestDecision:
    """What to do with one REST request. `model` and `version` are the path's, checked characters only."""

    verdict: Verdict
    route: Route | None = None
    model: str = ""
    version: str = ""
    allowed_methods: tuple[str, ...] = ()


def decide_rest(method: str, path: str) -> RestDecision:
    """Look a request up by its raw path. A known path with another method is DENY with the methods."""
    for rule in REST_RULES:
        match = rule.pattern.fullmatch(path)
        if match is None:
            continue
        parts = match.groupdict()
        model, version = parts.get("model") or "", parts.get("version") or ""
        if model in (".", ".."):
            break
        if method not in rule.methods:
            return RestDecision(Verdict.DENY, rule.route, allowed_methods=rule.methods)
        return RestDecision(rule.verdict, rule.route, model, version)
    return RestDecision(Verdict.DENY)


def unknown_model(name: str) -> str:
    """Triton's own words for a model that it does not have (core, model_repository_manager.cc)."""
    return f"Request for unknown model: '{name}' is not found"


def hidden_rest(route: Route | None, name: str) -> tuple[int, str]:
    """Status and error with which Triton 2.51 answers for a model that it does not have, by route."""
    if route is Route.MODEL_READY:
        return 400, "Model version not ready"
    if route is Route.STATS:
        return 400, f"requested model '{name}' is not available"
    return 404, unknown_model(name)


SERVICE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

RPC_RULES: Mapping[str, Verdict] = {
    f"/{SERVICE}/ServerLive": Verdict.LOCAL,
    f"/{SERVICE}/ServerReady": Verdict.LOCAL,
    f"/{SERVICE}/ModelReady": Verdict.ALLOW,
    f"/{SERVICE}/ServerMetadata": Verdict.FILTER,
    f"/{SERVICE}/ModelMetadata": Verdict.ALLOW,
    f"/{SERVICE}/ModelInfer": Verdict.ALLOW,
    f"/{SERVICE}/ModelStreamInfer": Verdict.ALLOW,
    f"/{SERVICE}/ModelConfig": Verdict.ALLOW,
    # An empty name requests every model; the name is filled in.
    f"/{SERVICE}/ModelStatistics": Verdict.ALLOW,
    f"/{SERVICE}/RepositoryIndex": Verdict.LOCAL,
    f"/{SERVICE}/RepositoryModelLoad": Verdict.BLOCK,
    f"/{SERVICE}/RepositoryModelUnload": Verdict.BLOCK,
    f"/{SERVICE}/SystemSharedMemoryStatus": Verdict.BLOCK,
    f"/{SERVICE}/SystemSharedMemoryRegister": Verdict.BLOCK,
    f"/{SERVICE}/SystemSharedMemoryUnregister": Verdict.BLOCK,
    f"/{SERVICE}/CudaSharedMemoryStatus": Verdict.BLOCK,
    f"/{SERVICE}/CudaSharedMemoryRegister": Verdict.BLOCK,
    f"/{SERVICE}/CudaSharedMemoryUnregister": Verdict.BLOCK,
    f"/{SERVICE}/TraceSetting": Verdict.BLOCK,
    f"/{SERVICE}/LogSettings": Verdict.BLOCK,
    f"/{HEALTH}/Check": Verdict.LOCAL,
    f"/{HEALTH}/Watch": Verdict.LOCAL,
}

# Extensions of the server that its clients cannot use through a proxy.
HIDDEN_EXTENSIONS = frozenset(
    {
        "model_repository",
        "model_repository(unload_dependents)",
        "system_shared_memory",
        "cuda_shared_memory",
        "trace",
        "logging",
    }
)


def decide_rpc(method: str) -> Verdict:
    """Look an RPC up by its path `/package.Service/Method`."""
    return RPC_RULES.get(method, Verdict.DENY)
