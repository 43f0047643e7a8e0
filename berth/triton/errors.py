"""What Triton can answer to an admin call."""


class TritonError(Exception):
    """Base of all. The message is Triton's own where there is one."""


class TritonUnavailable(TritonError):
    """No answer, or the server is starting or exiting; the same call may work later."""


class TritonLate(TritonUnavailable):
    """No answer within our time; Triton goes on with the request."""


class TritonRefused(TritonError):
    """Triton answered with an error: the load failed, or a name or key is wrong."""
