"""Errors of values that cross a boundary. Adapters have hierarchies of their own."""


class InvalidValue(ValueError):
    """A value from outside breaks its contract. The message says what, and what would be right."""


class InvalidPod(InvalidValue):
    """A pod's Berth fields cannot be read; retrying without a change of the pod cannot help."""


class UnreadableReport(InvalidValue):
    """A node's report annotation cannot be read; the node's facts are unknown."""


class ReportTooLarge(Exception):
    """A node has more models than its report can name; there is no shorter form that still names each reservation."""
