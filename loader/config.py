"""The loader's options."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.ids import ModelName, parse_model_name
from berth.runtime import options as opt


def _sha256(text: str) -> str:
    if len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef"):
        raise InvalidValue(f"{text!r} is not a SHA-256 in hexadecimal")
    return text.lower()


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(opt.CommonOptions):
    """`berth loader --help`."""

    model: ModelName = opt.option("the model's name in Triton", parse=parse_model_name, metavar="NAME")
    uri: str | None = opt.option(
        "where the model comes from: file:// or http(s)://, a directory, an archive or a model file",
        default=None,
        metavar="URI",
    )
    model_src: Path | None = opt.option(
        "a directory with the model, instead of --uri", default=None, parse=Path, metavar="DIR"
    )
    agent: Endpoint = opt.endpoint("the node's agent", required=True)
    token_file: Path | None = opt.option(
        "the pod's projected token of audience berth-agent", default=None, parse=Path, metavar="FILE"
    )
    sha256: str | None = opt.option(
        "what a downloaded file must hash to", default=None, parse=_sha256, metavar="HEX"
    )
    work_dir: Path = opt.option(
        "where downloads and unpacked archives go until they are sent",
        default=Path(tempfile.gettempdir()),
        parse=Path,
        metavar="DIR",
        shown="the system's temporary directory",
    )
    # A DaemonSet replaces its pods one node at a time; an agent may be away for an image pull.
    agent_timeout: float = opt.seconds("how long an agent may be away", default=120.0, minimum=1.0)
    # From byte to byte, not in all: a large model may take an hour.
    idle_timeout: float = opt.seconds("how long a download may stand still", default=60.0, minimum=1.0)
    # The pod holds its GPU memory meanwhile: 512 GiB at 24 MiB/s.
    download_timeout: float = opt.seconds(
        "how long a download may take in all, with all its tries", default=6 * 3600.0, minimum=1.0
    )
    # As the agent's --max-model-bytes: more than that it would refuse.
    max_download_bytes: int = opt.option(
        "the largest file that is downloaded",
        default=512 * 1024**3,
        parse=opt.byte_count,
        metavar="QUANTITY",
        shown="512Gi",
    )
