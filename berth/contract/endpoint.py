"""HOST:PORT as a value."""

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
