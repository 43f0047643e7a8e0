"""The agent's heartbeat: it means that the agent works, not only that its process runs."""

import asyncio
from collections.abc import Callable

from agent.reporter import Reporter
from berth.contract.keys import Keys
from berth.kube.lease import Heartbeat

_FAILURE_CHARACTERS = 512


class Stalled(Exception):
    """A loop of the agent makes no progress; its node must not look alive."""


class AgentHeartbeat:
    """`passed()` is called by each loop after a pass; none may be silent for `patience_seconds`.

    A report that cannot be written does not stop the heartbeat, which then says so: an agent that lives
    and a report that is current are two facts, and only both together make a node's figures good.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        reporter: Reporter,
        *,
        keys: Keys,
        patience_seconds: float,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        self._heartbeat, self._reporter, self._keys = heartbeat, reporter, keys
        self._patience, self._clock = patience_seconds, clock
        self._passed_at: dict[str, float] = {}

    def passed(self, loop: str) -> None:
        self._passed_at[loop] = self._clock()

    async def beat(self) -> None:
        """Write the heartbeat once. Raises Stalled or KubeError."""
        late = [name for name, at in self._passed_at.items() if self._clock() - at > self._patience]
        if late:
            raise Stalled(f"no heartbeat while these do not work: {', '.join(late)}")
        failure = self._reporter.failure
        if not failure and not self._reporter.has_written:
            raise Stalled("no heartbeat before the first report")
        await self._heartbeat.beat({self._keys.report_behind: failure[:_FAILURE_CHARACTERS] or None})
        self._reporter.announced(failure)
