"""Models that are scaled, for benches and tests: their annotations, and requests to them."""

import json
from collections.abc import Sequence
from typing import Final

from bench.scaler.traffic import request_of
from berth.contract.keys import Keys

_KNATIVE: Final = "autoscaling.knative.dev/"
# The shortest that Knative takes.
WINDOW: Final = "6s"


def scaling(*, clients: str = "", **annotations: str) -> dict[str, str]:
    """A Deployment's annotations: Knative's by their names with underscores, and `clients`, Berth's."""
    given = {"class": "kpa.autoscaling.knative.dev", "window": WINDOW, "target-utilization-percentage": "100"}
    given |= {name.strip("_").replace("_", "-"): value for name, value in annotations.items()}
    found = {f"{_KNATIVE}{name}": value for name, value in given.items()}
    return {**found, Keys().clients: clients} if clients else found


def echo_request(model: str, data: Sequence[int] = (1, 2, 3), **parameters: int) -> bytes:
    """To ECHO of `bench.proxy.upstreams`: it answers `data`, after `sleep_ms`."""
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [len(data)], "data": list(data)}
    body = {"inputs": [tensor], **({"parameters": parameters} if parameters else {})}
    return request_of("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())


def echoed(body: bytes) -> list[int]:
    """What ECHO has answered."""
    (output,) = json.loads(body)["outputs"]
    found: list[int] = output["data"]
    return found
