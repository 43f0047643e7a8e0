from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_PENDING: _ClassVar[ModelState]
    MODEL_STATE_STAGED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_UNLOADING: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
    MODEL_STATE_LOST: _ClassVar[ModelState]

class FailureClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CLASS_UNSPECIFIED: _ClassVar[FailureClass]
    FAILURE_CLASS_CAPACITY: _ClassVar[FailureClass]
    FAILURE_CLASS_INVALID_MODEL: _ClassVar[FailureClass]
    FAILURE_CLASS_TRANSIENT: _ClassVar[FailureClass]
    FAILURE_CLASS_QUARANTINED: _ClassVar[FailureClass]
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_PENDING: ModelState
MODEL_STATE_STAGED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_UNLOADING: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_LOST: ModelState
FAILURE_CLASS_UNSPECIFIED: FailureClass
FAILURE_CLASS_CAPACITY: FailureClass
FAILURE_CLASS_INVALID_MODEL: FailureClass
FAILURE_CLASS_TRANSIENT: FailureClass
FAILURE_CLASS_QUARANTINED: FailureClass

class StageRequest(_message.Message):
    __slots__ = ("header", "file", "chunk", "commit")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    header: StageHeader
    file: StageFile
    chunk: bytes
    commit: StageCommit
    def __init__(self, header: _Optional[_Union[StageHeader, _Mapping]] = ..., file: _Optional[_Union[StageFile, _Mapping]] = ..., chunk: _Optional[bytes] = ..., commit: _Optional[_Union[StageCommit, _Mapping]] = ...) -> None: ...

class StageHeader(_message.Message):
    __slots__ = ("model_name", "digest", "files", "config")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    digest: str
    files: _containers.RepeatedCompositeFieldContainer[StageFile]
    config: bytes
    def __init__(self, model_name: _Optional[str] = ..., digest: _Optional[str] = ..., files: _Optional[_Iterable[_Union[StageFile, _Mapping]]] = ..., config: _Optional[bytes] = ...) -> None: ...

class StageFile(_message.Message):
    __slots__ = ("path", "size")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class StageCommit(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("digest", "files", "bytes", "already_staged")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALREADY_STAGED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    files: int
    bytes: int
    already_staged: bool
    def __init__(self, digest: _Optional[str] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., already_staged: _Optional[bool] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("state", "reason", "failure_class")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    state: ModelState
    reason: str
    failure_class: FailureClass
    def __init__(self, state: _Optional[_Union[ModelState, str]] = ..., reason: _Optional[str] = ..., failure_class: _Optional[_Union[FailureClass, str]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("model_name",)
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    def __init__(self, model_name: _Optional[str] = ...) -> None: ...

class UnloadResponse(_message.Message):
    __slots__ = ("outcome",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[UnloadResponse.Outcome]
        OUTCOME_UNLOADED: _ClassVar[UnloadResponse.Outcome]
        OUTCOME_KEPT: _ClassVar[UnloadResponse.Outcome]
    OUTCOME_UNSPECIFIED: UnloadResponse.Outcome
    OUTCOME_UNLOADED: UnloadResponse.Outcome
    OUTCOME_KEPT: UnloadResponse.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: UnloadResponse.Outcome
    def __init__(self, outcome: _Optional[_Union[UnloadResponse.Outcome, str]] = ...) -> None: ...

class WatchModelRequest(_message.Message):
    __slots__ = ("model_name", "limits")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    limits: ReplicaLimits
    def __init__(self, model_name: _Optional[str] = ..., limits: _Optional[_Union[ReplicaLimits, _Mapping]] = ...) -> None: ...

class ReplicaLimits(_message.Message):
    __slots__ = ("container_concurrency", "queue_depth", "request_timeout_seconds", "max_json_bytes", "max_request_bytes")
    CONTAINER_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_JSON_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    container_concurrency: int
    queue_depth: int
    request_timeout_seconds: float
    max_json_bytes: int
    max_request_bytes: int
    def __init__(self, container_concurrency: _Optional[int] = ..., queue_depth: _Optional[int] = ..., request_timeout_seconds: _Optional[float] = ..., max_json_bytes: _Optional[int] = ..., max_request_bytes: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model_name", "state", "reason", "gpu_uuid", "requested_bytes", "measured_bytes", "gateway")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    state: ModelState
    reason: str
    gpu_uuid: str
    requested_bytes: int
    measured_bytes: int
    gateway: Gateway
    def __init__(self, model_name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., reason: _Optional[str] = ..., gpu_uuid: _Optional[str] = ..., requested_bytes: _Optional[int] = ..., measured_bytes: _Optional[int] = ..., gateway: _Optional[_Union[Gateway, _Mapping]] = ...) -> None: ...

class Gateway(_message.Message):
    __slots__ = ("endpoint", "ticket")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    ticket: bytes
    def __init__(self, endpoint: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...
