"""What is looked at before the scaler starts."""

import asyncio
from pathlib import Path

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import ConfigError
from scaler.app import main, recording
from scaler.config import ScalerOptions
from scaler.core.actions import NoRecord


async def test_certificates_are_looked_at_before_the_api_server_is_asked(tmp_path: Path) -> None:
    options = ScalerOptions(
        kubeconfig=str(tmp_path / "none"),
        keda_listen=Endpoint("127.0.0.1", 0),
        keda_client_ca=tmp_path / "ca",
    )
    with pytest.raises(ConfigError, match="--keda-client-ca needs --tls-cert"):
        await main(options, asyncio.Event())


def test_a_record_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with recording(None, {}) as record:
        assert isinstance(record, NoRecord)
    with (
        pytest.raises(ConfigError, match=r"--record: .*No such file"),
        recording(tmp_path / "no" / "file", {}),
    ):
        pass
