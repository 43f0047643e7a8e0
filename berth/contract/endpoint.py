"""Where something listens, as a value: HOST:PORT, or the path of a unix socket."""

from dataclasses import dataclass

from berth.contract.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP address. IPv6 hosts are written in brackets: `[::1]:8000`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Raises InvalidValue. Port 0 is allowed: a listener then takes a free one."""
        host, separator, port = text.rpartition(":")
        if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidValue(f"{text!r} is not HOST:PORT")
        bracketed = host.startswith("[") and host.endswith("]")
        if not host or (":" in host and not bracketed):
            raise InvalidValue(f"{text!r} is not HOST:PORT; write an IPv6 host in brackets: [{host}]:{port}")
        return cls(host[1:-1] if bracketed else host, int(port))


# As sun_path has it (unix(7)), without its final NUL.
_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket in the file system. As gRPC writes it: `unix:/run/triton.sock:8001`."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = Endpoint | UnixSocket


def parse_address(text: str) -> Address:
    """`unix:PATH` or HOST:PORT. Raises InvalidValue."""
    scheme, separator, path = text.partition(":")
    if scheme != "unix" or not separator or path.isdigit():
        return Endpoint.parse(text)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidValue(f"{text!r} is not unix: and the whole path of a socket")
    if len(path.encode()) > _PATH_BYTES:
        raise InvalidValue(f"{text!r} is longer than the path of a socket may be: {_PATH_BYTES} bytes")
    return UnixSocket(path)
