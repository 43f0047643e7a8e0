"""What the API answers: the status of each error, and a model as its messages show it. Pure."""

import grpc

from agent.admission import CodeRefused, InvalidModel
from agent.auth import NotAllowed, Unauthenticated
from agent.disk_space import DiskFull
from agent.gpus import GpusUnknown
from agent.limits import Busy
from agent.models import IdTaken, Model, OneModelOnly, PodGone
from agent.placement import NotPlaced
from agent.stage import SenderGone
from agent.staging import BadStream, TooLarge, WrongDigest
from berth.contract.errors import InvalidValue
from berth.contract.report import Failure, ModelState
from berth.kube.errors import KubeError
from berth.triton.errors import TritonError
from berth.v1 import node_agent_pb2 as pb

# The first that fits.
CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (OneModelOnly, grpc.StatusCode.PERMISSION_DENIED),
    (PodGone, grpc.StatusCode.PERMISSION_DENIED),
    (NotPlaced, grpc.StatusCode.FAILED_PRECONDITION),
    (CodeRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidModel, grpc.StatusCode.INVALID_ARGUMENT),
    (Busy, grpc.StatusCode.UNAVAILABLE),
    (DiskFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (SenderGone, grpc.StatusCode.DEADLINE_EXCEEDED),
    (IdTaken, grpc.StatusCode.ALREADY_EXISTS),
    (TooLarge, grpc.StatusCode.OUT_OF_RANGE),
    (WrongDigest, grpc.StatusCode.DATA_LOSS),
    (BadStream, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidValue, grpc.StatusCode.INVALID_ARGUMENT),
    (TritonError, grpc.StatusCode.UNAVAILABLE),
    (KubeError, grpc.StatusCode.UNAVAILABLE),
    (GpusUnknown, grpc.StatusCode.UNAVAILABLE),
    # A full or broken disk; the message is the system's.
    (OSError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
MAPPED = tuple(kind for kind, _ in CODES)
STATES = {state: f"MODEL_STATE_{state.name}" for state in ModelState}
FAILURES: dict[Failure | None, str] = {
    None: "FAILURE_CLASS_UNSPECIFIED",
    **{failure: f"FAILURE_CLASS_{failure.name}" for failure in Failure},
}


def code_of(error: Exception) -> grpc.StatusCode:
    """Of an error of one of MAPPED."""
    return next(code for kind, code in CODES if isinstance(error, kind))


def retry_pause(error: Exception) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: when the call is to be tried again. gRPC's own retries go by it, too."""
    if not isinstance(error, Busy):
        return ()
    return (("grpc-retry-pushback-ms", f"{error.retry_seconds * 1000:.0f}"),)


def progress_of(model: Model) -> pb.LoadProgress:
    return pb.LoadProgress(
        state=STATES[model.state], reason=model.reason, failure_class=FAILURES[model.failure]
    )


def status_of(model: Model, gateway: pb.Gateway | None, *, gpu_failure: str = "") -> pb.ModelStatus:
    """`gpu_failure`: what is wrong with its GPU. Triton may go on serving it there; it must get no requests."""
    return pb.ModelStatus(
        model_name=model.name or "",
        state=STATES[ModelState.FAILED if gpu_failure else model.state],
        reason=gpu_failure or model.reason,
        gpu_uuid="" if model.gpu is None else model.gpu.uuid,
        requested_bytes=model.requested_bytes,
        measured_bytes=model.measured_bytes,
        gateway=gateway,
    )
