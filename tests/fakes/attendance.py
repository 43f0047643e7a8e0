"""The scaler's streams with activators, as its metrics see them."""

from collections.abc import Sequence

from scaler.activation.attend import Attached, Figures


class FakeAttendance:
    def __init__(self, attached: Sequence[Attached] = (), figures: Figures | None = None) -> None:
        self.figures, self._attached = figures or Figures(), attached

    def attached(self) -> Sequence[Attached]:
        return self._attached
