"""How many REST requests are outstanding at one Triton, and which replica has the next turn. Pure.

Triton's REST front end (libevhtp) hands each answer to the thread that writes it through a socket that does not block and
holds some 280 of them. What does not fit is dropped silently, from any client: the request has been executed, and
its client waits until its time is up. So no more requests are with Triton at once than one such socket holds; measured
with one thread, 270 lost nothing, 290 up to 9, 320 always 38. What Triton does not compute (half a request, an answer that
is on its way) counts for nothing here.

A replica may have one more than are then free, as with connections: however much one requests, another is served at
once, and those that wait take turns. A quarter is not counted as free by a replica that has any. Without it eight replicas that
compute for a minute each would have all, and every other on the node waited for them.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

# All of one process, or of several that share it. Below what one thread of Triton's can lose, with room for the
# questions that are not counted.
MOST_OUTSTANDING: Final = 256
# Of that, for replicas that have none with Triton: one each.
_KEPT_PART: Final = 4


class Outstanding:
    """Of one process, for all its replicas."""

    __slots__ = ("_serves", "free", "kept", "waiting")

    def __init__(self, limit: int = MOST_OUTSTANDING, *, is_shared: bool = True) -> None:
        """`is_shared`: by several replicas. A single one may have all that are free."""
        self.free, self.kept = limit, limit // _KEPT_PART if is_shared else -limit
        # Shares whose turn is to come.
        self.waiting: OrderedDict[Share, None] = OrderedDict()
        self._serves = False

    def wait(self, share: "Share") -> None:
        """For a share alone."""
        self.waiting[share] = None

    def serve(self) -> None:
        """For a share alone: who waits has a turn, in their order; who then still waits says so again, and is last."""
        if self._serves:  # one that gives back at once what it was given: the turns below go on with it
            return
        self._serves = True
        for _ in range(len(self.waiting)):
            if not self.free:  # or those behind would lose their places to who has just had its turn
                break
            share, _ = self.waiting.popitem(last=False)
            if share.has_room:
                share.hand_out()
            else:
                self.waiting[share] = None
        self._serves = False


class Share:
    """One replica's part."""

    __slots__ = ("_whole", "hand_out", "taken")

    def __init__(self, whole: Outstanding, hand_out: Callable[[], None]) -> None:
        """`hand_out`: called at its turn, after `wait`; must not raise."""
        self._whole, self.hand_out, self.taken = whole, hand_out, 0

    @property
    def has_room(self) -> bool:
        """Whether `take` would take one."""
        whole = self._whole
        return self.taken <= whole.free - whole.kept if self.taken else whole.free > 0

    def take(self) -> bool:
        """True: one more is taken. False: nothing has changed."""
        whole = self._whole
        free = whole.free
        if free <= 0 or (self.taken and self.taken > free - whole.kept):
            return False
        self.taken += 1
        whole.free = free - 1
        return True

    def give(self) -> None:
        whole = self._whole
        self.taken -= 1
        whole.free += 1
        if whole.waiting:
            whole.serve()

    def wait(self) -> None:
        """Call it as often as you like."""
        self._whole.wait(self)
