"""What stands in for container images, which a process kubelet cannot pull."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Image:
    """The programs of an image, as they are on this machine.

    `programs` is a directory that is searched before the machine's own. `environment` stands below the
    container's own variables and may refer to `$(POD_IP)`; paths in it are this machine's.
    """

    entrypoint: tuple[str, ...] = ()
    programs: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Images:
    """By repository, whatever the registry, tag or digest. Any other image has this machine's programs."""

    def __init__(self, known: Mapping[str, Image]) -> None:
        self._known = dict(known)

    def of(self, reference: str) -> Image:
        """`registry:5000/team/berth:0.1` is `berth`."""
        repository = reference.rpartition("/")[2].partition("@")[0].partition(":")[0]
        return self._known.get(repository, Image())
