"""The scaler's streams with activators, as its metrics see them."""

from collections.abc import Sequence

from scaler.activation.control_server import ControlStats
from scaler.activation.sessions import Connected


class FakeControlServer:
    def __init__(self, connected: Sequence[Connected] = (), stats: ControlStats | None = None) -> None:
        self.stats, self._connected = stats or ControlStats(), connected

    def connected(self) -> Sequence[Connected]:
        return self._connected
