"""What a user does with a served model: inference with NVIDIA's own client, checked against the arithmetic."""

from collections.abc import Awaitable
from typing import Any

import numpy as np
from tritonclient.grpc.aio import InferenceServerClient as GrpcClient
from tritonclient.grpc.aio import InferInput as GrpcInput
from tritonclient.http.aio import InferenceServerClient as HttpClient
from tritonclient.http.aio import InferInput as HttpInput
from tritonclient.utils import InferenceServerException

_LEFT, _RIGHT = np.arange(16, dtype=np.int32), np.ones(16, dtype=np.int32)


async def infer_rest(address: str, model: str) -> None:
    """One REST inference of the sample model. Raises AssertionError for a wrong answer."""
    await _infer(HttpClient(address), HttpInput, model)


async def infer_grpc(address: str, model: str) -> None:
    """One gRPC inference of the sample model. Raises AssertionError for a wrong answer."""
    await _infer(GrpcClient(address), GrpcInput, model)


async def is_hidden(http: str, grpc: str, model: str) -> bool:
    """True if both front ends answer for `model` as Triton does for one that it does not know."""
    return await _is_unknown(infer_rest(http, model)) and await _is_unknown(infer_grpc(grpc, model))


async def _infer(client: Any, tensor: Any, model: str) -> None:
    inputs = [tensor("INPUT0", [16], "INT32"), tensor("INPUT1", [16], "INT32")]
    inputs[0].set_data_from_numpy(_LEFT)
    inputs[1].set_data_from_numpy(_RIGHT)
    try:
        result = await client.infer(model, inputs)
    finally:
        await client.close()
    assert (result.as_numpy("OUTPUT0") == _LEFT + _RIGHT).all(), "wrong sum"
    assert (result.as_numpy("OUTPUT1") == _LEFT - _RIGHT).all(), "wrong difference"


async def _is_unknown(inference: Awaitable[None]) -> bool:
    try:
        await inference
    except InferenceServerException as error:
        return "is not found" in error.message()
    return False
