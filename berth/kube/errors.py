"""The errors of requests to the API server. Only an error that a caller handles gets a class."""


class KubeError(Exception):
    """Base of all. `status` is the HTTP status, or None where no answer came."""

    status: int | None = None
    reason: str = ""


class KubeUnreachable(KubeError):
    """No answer: refused, reset, timed out, name unknown, TLS failed."""


class KubeResponseError(KubeError):
    """The API server answered with an error. `reason` is the machine word of its Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status, self.reason, self.message = status, reason, message


class NotFound(KubeResponseError):
    """404: the object, or its collection, does not exist."""


class Conflict(KubeResponseError):
    """409: it exists already, a precondition failed, or another client was first."""


class Gone(KubeResponseError):
    """410: the resourceVersion is too old to watch from; list again."""


class Denied(KubeResponseError):
    """401 or 403: the credentials are wrong, or RBAC does not allow this."""


class Invalid(KubeResponseError):
    """422 or 400: the object breaks the API's rules."""


_BY_STATUS: dict[int, type[KubeResponseError]] = {
    400: Invalid,
    401: Denied,
    403: Denied,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
}


def response_error(status: int, reason: str, message: str) -> KubeResponseError:
    """The error for an HTTP status and the API server's Status object."""
    return _BY_STATUS.get(status, KubeResponseError)(status, reason, message)


def may_pass(error: KubeError) -> bool:
    """Whether the same request may be answered otherwise a moment later: no answer, too many requests, or a failure of the
    API server's own."""
    return error.status is None or error.status == 429 or error.status >= 500
