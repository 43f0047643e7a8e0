"""What a model is called: by its clients, and by the node's Triton. Pure.

The server's name is longer than the public one and occurs nowhere by accident (`server_name_of`), so it may
be replaced wherever it is seen. Where both are the same, as in a proxy for one model, nothing is touched.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Names:
    """`server` is at least as long as `public`: what is replaced in place is filled up with blanks."""

    public: bytes
    server: bytes
    are_same: bool = field(init=False)
    # A tensor answer's member as Triton writes it, and what clients read in its place, of the same length.
    server_member: bytes = field(init=False, repr=False)
    public_member: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if len(self.server) < len(self.public):
            raise ValueError(f"{self.server!r} is shorter than {self.public!r}, in whose place it stands")
        member = b'"model_name":"%b"'
        server, public = member % self.server, member % self.public
        object.__setattr__(self, "are_same", self.public == self.server)
        object.__setattr__(self, "server_member", server)
        object.__setattr__(self, "public_member", public.ljust(len(server)))

    def to_public(self, text: bytes) -> bytes:
        """Text of Triton's as clients may see it; another length where the name stood in it."""
        return text if self.are_same else text.replace(self.server, self.public)
