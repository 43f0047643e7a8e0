"""A scheduler extender that lets nothing pass and notes which nodes it was asked about.

kube-scheduler asks an extender after its own filter plugins and names exactly the nodes that passed
all of them (pkg/scheduler/schedule_one.go, findNodesThatPassExtenders). With none left it does not ask.
"""

import json
from typing import Any

from aiohttp import web

FILTER_VERB = "filter"


class Contradiction(Exception):
    """kube-scheduler gave two different sets of nodes for one pod in an unchanged world."""


class Extender:
    """`passed` are the nodes by the pod's uid, noted while `listening`."""

    def __init__(self) -> None:
        self.passed: dict[str, frozenset[str]] = {}
        self.listening = False
        self._contradictions: list[str] = []

    def begin(self) -> None:
        """Forget everything and note what comes from now on."""
        self.passed.clear()
        self._contradictions.clear()
        self.listening = True

    def end(self) -> None:
        """Note no more: the world changes. Raises Contradiction if it seemed to change before."""
        self.listening = False
        if self._contradictions:
            raise Contradiction("; ".join(self._contradictions))

    def application(self) -> web.Application:
        application = web.Application(client_max_size=16 * 1024**2)
        application.router.add_post(f"/{FILTER_VERB}", self._filter)
        return application

    async def _filter(self, request: web.Request) -> web.Response:
        # The Go types have no JSON tags (k8s.io/kube-scheduler/extender/v1/types.go): field names as they are.
        arguments: dict[str, Any] = json.loads(await request.read())
        names: list[str] = arguments["NodeNames"]
        if self.listening:
            self._note(arguments["Pod"]["metadata"], frozenset(names))
        return web.json_response({"NodeNames": [], "FailedNodes": dict.fromkeys(names, "held")})

    def _note(self, metadata: dict[str, Any], names: frozenset[str]) -> None:
        before = self.passed.setdefault(metadata["uid"], names)
        if before != names:
            self._contradictions.append(f"{metadata['name']}: {sorted(before)}, then {sorted(names)}")
