"""What was decided once about some bytes, looked up by them the next time."""

from typing import TypeVar

V = TypeVar("V")


class Lookup(dict[bytes, V]):
    """A dict that stays small: clients choose the keys."""

    def __init__(self, *, entries: int, key_bytes: int) -> None:
        super().__init__()
        self._entries, self._key_bytes = entries, key_bytes

    def remember(self, key: bytes, value: V) -> None:
        """Keep a value, unless its key is too long; when all places are taken, begin anew."""
        if len(key) > self._key_bytes:
            return
        if len(self) >= self._entries:
            self.clear()
        self[key] = value
