"""How many bytes may be somewhere at once. Pure.

A part of a whole (a replica's of its process') may have no more than is then left for all others: however much
one takes, another still finds room, and the more share it, the less each may have (dynamic thresholds, as
switches share their buffers: Choudhury and Hahne, 1998).
"""


class Budget:
    """`take`, and `give` as much once: who took it sees to that."""

    __slots__ = ("limit_bytes", "parent", "used_bytes")

    def __init__(self, limit_bytes: int, parent: "Budget | None" = None) -> None:
        self.limit_bytes, self.parent = limit_bytes, parent
        self.used_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether `take` would take them."""
        used, parent = self.used_bytes + size_bytes, self.parent
        if used > self.limit_bytes:
            return False
        if parent is None:
            return True
        # One that is no part of another has that much room by this alone.
        return used <= parent.free_bytes - size_bytes and (
            parent.parent is None or parent.has_room(size_bytes)
        )

    def take(self, size_bytes: int) -> bool:
        """True: they are taken. False: nothing has changed."""
        used, parent = self.used_bytes + size_bytes, self.parent
        if used > self.limit_bytes:
            return False
        if parent is not None and (used > parent.free_bytes - size_bytes or not parent.take(size_bytes)):
            return False
        self.used_bytes = used
        return True

    def charge(self, size_bytes: int) -> None:
        """They are there already, whatever may be: who comes next waits for it."""
        self.used_bytes += size_bytes
        if self.parent is not None:
            self.parent.charge(size_bytes)

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, "given twice"
        if self.parent is not None:
            self.parent.give(size_bytes)

    def change(self, had_bytes: int, has_bytes: int) -> bool:
        """What was taken is another size now; as `take`."""
        if has_bytes <= had_bytes:
            self.give(had_bytes - has_bytes)
            return True
        return self.take(has_bytes - had_bytes)

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes

    @property
    def is_exceeded(self) -> bool:
        """More was charged than `take` would have given: of those that share a whole the greedy one's, no other's."""
        parent = self.parent
        return self.used_bytes > self.limit_bytes or (
            parent is not None and self.used_bytes > parent.free_bytes
        )
