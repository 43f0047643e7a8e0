"""Which replica leads, and where it answers over HTTP: the leader alone knows what is promised.

A replica that does not lead sends its caller to the one that does (307). Where that is stands in the holder's identity in
the Lease.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from berth.contract.errors import InvalidValue

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RETRY_AFTER: Final = {"Retry-After": "1"}


def identity(name: str, *, extender_url: str | None, schedulable_url: str | None) -> str:
    """The holder's identity: its name; after a comma where the scaler is answered, after an @ where its extender is."""
    name = f"{name},{schedulable_url}" if schedulable_url else name
    return f"{name}@{extender_url}" if extender_url else name


def extender_url_of(identity: str) -> str:
    """ "" where the replica serves no extender."""
    return identity.partition("@")[2].rstrip("/")


def schedulable_url_of(identity: str) -> str:
    """ "" where the replica does not answer the scaler."""
    return identity.partition("@")[0].partition(",")[2].rstrip("/")


def error(status: int, why: str) -> web.Response:
    """What every endpoint answers to what it does not take; worth another try where it is busy or no replica leads."""
    return web.json_response(
        {"error": why}, status=status, headers=_RETRY_AFTER if status in (429, 503) else {}
    )


class LeaderOnly:
    """`leads`: whether this replica does now; `leader_url`: where the leader answers, "" while that is unknown."""

    def __init__(self, leads: Callable[[], bool], leader_url: Callable[[], str]) -> None:
        self._leads, self._leader_url = leads, leader_url

    def guard(self, handler: Handler) -> Handler:
        """The handler, for a leader; a request that cannot be read is one clear error."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self._leads():
                return self.elsewhere(request)
            try:
                return await handler(request)
            except InvalidValue as invalid:
                return error(400, str(invalid))

        return guarded

    def elsewhere(self, request: web.Request) -> web.StreamResponse:
        """The answer of a replica that does not lead."""
        if self._leads() or not (leader := self._leader_url()):
            return error(503, "no replica of the binder leads")
        return web.Response(status=307, headers={"Location": f"{leader}{request.path}"})
