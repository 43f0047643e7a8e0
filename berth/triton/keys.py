"""The two keys that close a node's Triton.

Triton's restricted APIs ask for a header per class of routes (`--http-restricted-api`,
`--grpc-restricted-protocol`). The admin key opens what changes the server and stays with the agent;
the inference key opens what the gateway forwards. A pod that finds Triton's port has neither.
"""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from berth.contract.errors import InvalidValue

ADMIN_HEADER = "berth-admin-key"
INFERENCE_HEADER = "berth-inference-key"
ADMIN_APIS = "model-repository,shared-memory,logging,trace"
INFERENCE_APIS = "inference,metadata,statistics,model-config,health"

# How Triton reads a restricted-protocol key from gRPC metadata (docs/customization_guide/inference_protocols.md).
_GRPC_PREFIX = "triton-grpc-protocol-"
_FILES = {"admin": "admin", "inference": "inference"}


@dataclass(frozen=True, slots=True, repr=False)
class InferenceKey:
    """What the gateway has. A secret of one Triton process, never logged: `repr` does not show it."""

    secret: str

    def __repr__(self) -> str:
        return "InferenceKey(…)"

    @classmethod
    def read(cls, path: Path) -> "InferenceKey":
        """From its file, or from the directory that `TritonKeys.write` has written. Raises InvalidValue."""
        return cls(_read(path / _FILES["inference"] if path.is_dir() else path))

    @property
    def http_headers(self) -> dict[str, str]:
        return {INFERENCE_HEADER: self.secret}

    @property
    def grpc_metadata(self) -> dict[str, str]:
        return {_GRPC_PREFIX + INFERENCE_HEADER: self.secret}


@dataclass(frozen=True, slots=True, repr=False)
class TritonKeys:
    """Secrets of one Triton process. Never logged: `repr` does not show them."""

    admin: str
    inference: str

    def __repr__(self) -> str:
        return "TritonKeys(…)"

    @classmethod
    def generate(cls) -> "TritonKeys":
        return cls(admin=secrets.token_hex(16), inference=secrets.token_hex(16))

    @classmethod
    def read(cls, directory: Path) -> "TritonKeys":
        """Read the files `admin` and `inference`. Raises InvalidValue naming the file."""
        return cls(admin=_read(directory / _FILES["admin"]), inference=_read(directory / _FILES["inference"]))

    def write(self, directory: Path) -> None:
        """Write both files, readable by the owner's group only."""
        for name, secret in (("admin", self.admin), ("inference", self.inference)):
            write_secret(directory / _FILES[name], secret + "\n")

    def server_flags(self) -> list[str]:
        """The tritonserver flags that put the keys in force, on both front ends."""
        rules = ((ADMIN_APIS, ADMIN_HEADER, self.admin), (INFERENCE_APIS, INFERENCE_HEADER, self.inference))
        return [
            f"--{front_end}={apis}:{header}={secret}"
            for apis, header, secret in rules
            for front_end in ("http-restricted-api", "grpc-restricted-protocol")
        ]

    @property
    def inference_http_headers(self) -> dict[str, str]:
        return InferenceKey(self.inference).http_headers

    @property
    def inference_grpc_metadata(self) -> dict[str, str]:
        return InferenceKey(self.inference).grpc_metadata

    @property
    def admin_grpc_metadata(self) -> dict[str, str]:
        """For the agent: both keys."""
        return {_GRPC_PREFIX + ADMIN_HEADER: self.admin, **self.inference_grpc_metadata}


def write_secret(path: Path, text: str, *, mode: int = 0o440) -> None:
    """Put a file readable by the owner's group in place of what is there, which may be read-only: in one
    step, so that a process that is killed in between leaves nothing that breaks its successor, and durably,
    so that a node that loses power has the whole of it or nothing."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.chmod(mode)
    if _is_same(path, fresh):
        # Left as it is: a kubelet that is about to mount it by subPath finds no file in place of one that was replaced.
        fresh.unlink()
        return
    fresh.replace(path)


def _is_same(path: Path, fresh: Path) -> bool:
    """Content, owner, group and mode."""
    try:
        here, new = path.lstat(), fresh.lstat()
        return (here.st_uid, here.st_gid, here.st_mode) == (new.st_uid, new.st_gid, new.st_mode) and (
            path.read_bytes() == fresh.read_bytes()
        )
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}; berth keys makes it") from error
    except UnicodeDecodeError:
        secret = ""
    if not (secret.isascii() and secret.isalnum()):
        raise InvalidValue(f"{path}: not a key; berth keys makes one")
    return secret
