"""Which replica leads: the Lease that they elect by, who holds it now, and for how long this one may write."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol

from berth.contract.endpoint import Endpoint
from berth.kube import paths
from berth.kube.client import WRITE_SECONDS, KubeClient
from berth.kube.election import Election, LeadershipLost, Predecessor
from berth.kube.informer import Change, Informer
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise, work_or_stop
from scaler.config import LEASE, ScalerOptions

log = logging.getLogger(__name__)


class Leader(Protocol):
    """What a replica does while it leads."""

    async def lead(self, ended: asyncio.Event, is_certain: Callable[[], bool]) -> None:
        """Until `ended`."""
        ...

    def pause(self) -> None:
        """The Lease is not certain: decide on, write nothing."""
        ...

    async def resume(self, is_certain: Callable[[], bool]) -> None:
        """The Lease is this replica's again, and no other has led meanwhile."""
        ...

    async def close(self) -> bool:
        """Write nothing more. Whether no write may still be carried out."""
        ...


class Leadership:
    """Of one life of one replica: once another has led after it, the next one begins as a standby does."""

    def __init__(self, client: KubeClient, options: ScalerOptions) -> None:
        self._client, self._options = client, options
        self._since = time.monotonic()
        self.lease = Informer(
            client,
            paths.leases(options.system_namespace),
            params={"fieldSelector": f"metadata.name={LEASE}"},
            on_change=self._on_lease,
        )
        # HOST:PORT of the Lease's holder, and this replica's.
        self._holder = self._own = ""
        self._election: Election | None = None
        self._regained = asyncio.Event()

    @property
    def other(self) -> str:
        """HOST:PORT of the leader; "" where none is known: one that ends is still named by its Lease, and sends no client to
        itself."""
        return "" if self._holder == self._own else self._holder

    @property
    def host(self) -> str:
        """Of the leader, whichever it is."""
        return self._holder.rpartition(":")[0].strip("[]")

    def may_write(self) -> bool:
        """Asked before every write: a process that was stopped for a while learns of it here first, and what is written
        last is written before another replica can lead."""
        return self._election is None or self._election.is_certain(for_seconds=WRITE_SECONDS)

    async def run(self, leader: Leader, port: int, stop: asyncio.Event) -> None:
        """Until `stop`, or until another replica has led. `port`: where activators connect."""
        if not self._options.leader_elect:
            await leader.lead(stop, lambda: True)
            return
        name = identity(Endpoint(self._options.control_listen.host, port), self._options.pod_uid)
        self._own = address_of(name)
        predecessor = Predecessor(
            lambda holder: is_predecessor(holder, name, self._options.pod_uid), self._since
        )
        namespace = self._options.system_namespace
        election = self._election = Election(
            self._client, namespace=namespace, name=LEASE, identity=name, predecessor=predecessor
        )
        try:
            await self._elected(election, leader, stop)
        finally:
            # A Lease with writes that may still be carried out is left to run out, which takes longer than they can.
            if await leader.close():
                await asyncio.shield(election.release())

    async def _elected(self, election: Election, leader: Leader, stop: asyncio.Event) -> None:
        """A standby keeps its mirrors warm; a leader scales for as long as it is sure to lead."""
        ended = asyncio.Event()
        await work_or_stop(election.acquire(), stop)
        if stop.is_set():
            return
        async with supervise() as tasks:
            tasks.eternal("leadership", self._stay(election, leader, ended))
            tasks.eternal("resume", self._resume_each_time(election, leader))
            tasks.eternal("stop", _pass_on(stop, ended))
            await leader.lead(ended, election.is_certain)

    async def _stay(self, election: Election, leader: Leader, ended: asyncio.Event) -> None:
        """Lead for as long as no other replica has. Without the API server none can: the load is followed and decided by,
        and nothing is written until the Lease is renewed."""
        while True:
            try:
                await election.hold()
            except LeadershipLost as error:
                log.warning("leadership lost: deciding on, writing nothing", extra=fields(reason=str(error)))
            leader.pause()
            if not await election.regain():
                log.warning("another scaler leads: standing by", extra=fields(lease=LEASE))
                ended.set()
                await asyncio.Event().wait()
            self._regained.set()

    async def _resume_each_time(self, election: Election, leader: Leader) -> None:
        while True:
            await self._regained.wait()
            self._regained.clear()
            await leader.resume(election.is_certain)

    def _on_lease(self, change: Change) -> None:
        self._holder = address_of((change.object.get("spec") or {}).get("holderIdentity") or "")


def identity(control: Endpoint, pod_uid: str = "") -> str:
    """Unique for each life of each replica; ends in where its activators reach it, after an @, where that is known."""
    lives_in = pod_uid.replace("-", "") or str(os.getpid())
    name = f"{socket.gethostname()}-{lives_in}-{secrets.token_hex(4)}"
    return name if control.host in ("0.0.0.0", "::", "") else f"{name}@{control}"  # noqa: S104


def is_predecessor(holder: str, own: str, pod_uid: str) -> bool:
    """Whether a holder was the scaler of this pod before this one. A kubelet starts a container again only when the
    one before has ended; without the pod's uid this is unknown."""
    return bool(pod_uid) and holder != own and _life(holder) == _life(own)


def _life(identity: str) -> str:
    return identity.partition("@")[0].rpartition("-")[0]


def address_of(identity: str) -> str:
    return identity.partition("@")[2]


async def _pass_on(stop: asyncio.Event, ended: asyncio.Event) -> None:
    await stop.wait()
    ended.set()
    await asyncio.Event().wait()
