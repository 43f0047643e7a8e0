"""What may still be written to the repository's file system, for all streams together. Blocks: call it from a
thread; several may."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from berth.contract.quantity import format_bytes


class NoRoom(Exception):
    """The disk has no room for it now; it may have later."""


class Room:
    """The file system of `directory`, of which `keep_share` (0 to 1) of the bytes and of the inodes stays free.

    What streams have announced and not written yet counts as written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_share: float,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        self._directory, self._keep, self._statvfs = directory, keep_share, statvfs
        self._lock = threading.Lock()
        self._bytes = self._inodes = 0

    @property
    def announced(self) -> tuple[int, int]:
        """Bytes and inodes that are still to be written."""
        return self._bytes, self._inodes

    def share(self) -> "Share":
        """One stream's part of it."""
        return Share(self)

    def announce(self, *, count: int, inodes: int) -> None:
        """Raises NoRoom or OSError."""
        found = self._statvfs(self._directory)
        block = found.f_frsize
        with self._lock:
            total = found.f_blocks * block
            free = int(found.f_bavail * block - self._keep * total) - self._bytes
            if count > free:
                raise NoRoom(
                    f"No space left on device: {format_bytes(count)} were announced and"
                    f" {format_bytes(max(0, free))} of {format_bytes(total)} may be written; {self._keep:.0%}"
                    " stay free for the node (--keep-free)"
                )
            # Zero where the file system makes inodes as they are needed.
            if found.f_files and inodes > found.f_favail - self._keep * found.f_files - self._inodes:
                raise NoRoom(
                    f"No space left on device: it has {found.f_favail} inodes of {found.f_files} left, of which"
                    f" {self._keep:.0%} stay free for the node (--keep-free)"
                )
            self._bytes, self._inodes = self._bytes + count, self._inodes + inodes

    def settle(self, *, count: int, inodes: int) -> None:
        """So much of what was announced has been written, or never will be."""
        with self._lock:
            self._bytes, self._inodes = self._bytes - count, self._inodes - inodes


class Share:
    """What one stream has announced and not written yet."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._bytes = self._inodes = 0

    def announce(self, *, count: int, inodes: int) -> None:
        """Raises NoRoom or OSError."""
        self._room.announce(count=count, inodes=inodes)
        self._bytes, self._inodes = self._bytes + count, self._inodes + inodes

    def written(self, *, count: int = 0, inodes: int = 0) -> None:
        self._room.settle(count=count, inodes=inodes)
        self._bytes, self._inodes = self._bytes - count, self._inodes - inodes

    def close(self) -> None:
        """Whatever is left is not to come any more."""
        self.written(count=self._bytes, inodes=self._inodes)
