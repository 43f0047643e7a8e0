"""The space of the repository's file system that may still be written, for all streams together. Blocks: call it
from a thread; several threads may."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from berth.contract.quantity import format_bytes


class DiskFull(Exception):
    """The disk has no space for it now; it may have later."""


# What a stream may hold of the disk beside what it has written. One that announces much and sends little keeps no
# more than this from the others, and requests more only as it writes.
WINDOW_BYTES = 64 * 1024**2


class DiskSpace:
    """The file system of `directory`, of which `keep_share` (0 to 1) of the bytes and of the inodes stays free.

    What streams have reserved and not written yet counts as written.
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
    def reserved(self) -> tuple[int, int]:
        """Bytes and inodes that are still to be written."""
        return self._bytes, self._inodes

    def reservation(self) -> "DiskReservation":
        """What one stream reserves of it."""
        return DiskReservation(self)

    def reserve(self, *, count: int, inodes: int, more_bytes: int = 0) -> None:
        """`more_bytes`: what will come after these; it must have room now, and is not kept from others. Raises
        DiskFull or OSError."""
        found = self._statvfs(self._directory)
        block = found.f_frsize
        with self._lock:
            total = found.f_blocks * block
            free = int(found.f_bavail * block - self._keep * total) - self._bytes
            if count + more_bytes > free:
                raise DiskFull(
                    f"No space left on device: {format_bytes(count + more_bytes)} are to come and"
                    f" {format_bytes(max(0, free))} of {format_bytes(total)} may be written; {self._keep:.0%}"
                    " stay free for the node (--keep-free)"
                )
            # Zero where the file system makes inodes as they are needed.
            if found.f_files and inodes > found.f_favail - self._keep * found.f_files - self._inodes:
                raise DiskFull(
                    f"No space left on device: it has {found.f_favail} inodes of {found.f_files} left, of which"
                    f" {self._keep:.0%} stay free for the node (--keep-free)"
                )
            self._bytes, self._inodes = self._bytes + count, self._inodes + inodes

    def settle(self, *, count: int, inodes: int) -> None:
        """So much of what was reserved has been written, or never will be."""
        with self._lock:
            self._bytes, self._inodes = self._bytes - count, self._inodes - inodes


class DiskReservation:
    """What one stream has reserved and not written yet; of a file never more than a window."""

    def __init__(self, disk: DiskSpace) -> None:
        self._disk = disk
        self._bytes = self._inodes = 0
        self._to_come = 0  # of the file, and not reserved

    def announce(self, *, size: int, inodes: int) -> None:
        """A file of `size` bytes comes. Raises DiskFull or OSError."""
        count = min(size, WINDOW_BYTES)
        self._disk.reserve(count=count, inodes=inodes, more_bytes=size - count)
        self._bytes, self._inodes = self._bytes + count, self._inodes + inodes
        self._to_come = size - count

    def require(self, count: int) -> None:
        """So many bytes of the file are about to be written. Raises DiskFull or OSError where others have taken
        the room meanwhile."""
        short = count - self._bytes
        if short <= 0:
            return
        try:
            self._take(min(self._to_come, max(WINDOW_BYTES - self._bytes, short)))
        except DiskFull:
            self._take(short)  # the last bytes go to the stream that writes

    def _take(self, count: int) -> None:
        self._disk.reserve(count=count, inodes=0)
        self._bytes, self._to_come = self._bytes + count, self._to_come - count

    def written(self, *, count: int = 0, inodes: int = 0) -> None:
        self._disk.settle(count=count, inodes=inodes)
        self._bytes, self._inodes = self._bytes - count, self._inodes - inodes

    def close(self) -> None:
        """Whatever is left is not to come any more."""
        self.written(count=self._bytes, inodes=self._inodes)
