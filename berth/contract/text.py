"""Text of other authors, made safe to show."""

LINE_LIMIT = 600


def one_line(text: str, *, limit: int = LINE_LIMIT) -> str:
    """One line without control, bidirectional or other unprintable characters, at most `limit` characters.

    A pod's owner writes termination messages and annotations; a terminal would execute control sequences in them.
    """
    head = text[: 4 * limit]
    shown = " ".join("".join(c if c.isprintable() else " " for c in head).split())
    return shown if len(shown) <= limit and len(head) == len(text) else shown[: limit - 1] + "…"
