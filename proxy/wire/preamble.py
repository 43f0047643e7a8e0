"""What a connection to the gateway begins with: which protocol follows, and the ticket that names the replica. Pure.

    0   5  magic "BERTH"
    5   1  version, 1
    6   1  kind: what follows
    7   1  0
    8  32  ticket

The gateway answers with one byte, ACCEPTED, before anything else it sends; or closes without one.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

PREAMBLE_BYTES: Final = 40
TICKET_BYTES: Final = 32
ACCEPTED: Final = b"\x01"
_START: Final = b"BERTH\x01"


class Kind(IntEnum):
    REST = 1
    GRPC = 2
    # JSON lines: the replica's readiness and figures from the gateway, the wish to drain from the pod's proxy.
    REPORT = 3


class BadPreamble(Exception):
    """The peer is no pod's proxy of this version."""


@dataclass(frozen=True, slots=True)
class Preamble:
    """`ticket`: a secret, never logged."""

    kind: Kind
    ticket: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        return _START + bytes([self.kind, 0]) + self.ticket


def may_begin(data: bytes) -> bool:
    """Whether so many first bytes (fewer than PREAMBLE_BYTES perhaps) can be a preamble's."""
    return data[: len(_START)] == _START[: len(data)]


def read_preamble(data: bytes) -> Preamble:
    """Raises BadPreamble."""
    if len(data) < PREAMBLE_BYTES or not may_begin(data):
        raise BadPreamble(
            f"a connection begins with {PREAMBLE_BYTES} bytes: BERTH, version 1, kind, 0, ticket"
        )
    if data[6] not in set(Kind) or data[7]:
        raise BadPreamble(f"kind {data[6]}, {data[7]}; there are {', '.join(map(str, map(int, Kind)))}")
    return Preamble(Kind(data[6]), bytes(data[8:PREAMBLE_BYTES]))
