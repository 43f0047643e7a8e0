"""How the process' memory is managed while tensors stream through it."""

import ctypes
import gc

# mallopt(3), malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = 4 * 1024 * 1024


def settle() -> None:
    """Call once, when everything is loaded.

    Every read allocates up to 256 KiB and frees it soon after. Left to itself, glibc gives that memory
    back to the kernel and takes it again, zeroed, for each read, which costs more than the copying.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another libc may have none
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    gc.freeze()  # what is loaded by now stays: no collection needs to look at it
