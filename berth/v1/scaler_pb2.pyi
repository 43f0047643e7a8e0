from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_STATE_UNSPECIFIED: _ClassVar[HoldState]
    HOLD_STATE_HOLD: _ClassVar[HoldState]
    HOLD_STATE_FORWARD: _ClassVar[HoldState]
    HOLD_STATE_OFF: _ClassVar[HoldState]
HOLD_STATE_UNSPECIFIED: HoldState
HOLD_STATE_HOLD: HoldState
HOLD_STATE_FORWARD: HoldState
HOLD_STATE_OFF: HoldState

class AttendRequest(_message.Message):
    __slots__ = ("hello", "reports")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    hello: ActivatorHello
    reports: HoldReports
    def __init__(self, hello: _Optional[_Union[ActivatorHello, _Mapping]] = ..., reports: _Optional[_Union[HoldReports, _Mapping]] = ...) -> None: ...

class ActivatorHello(_message.Message):
    __slots__ = ("address", "leaving")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    address: str
    leaving: bool
    def __init__(self, address: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class HoldReports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[HoldReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[HoldReport, _Mapping]]] = ...) -> None: ...

class HoldReport(_message.Message):
    __slots__ = ("version", "namespace", "name", "held", "average_held", "arrived", "forwarded", "held_bytes", "oldest_seconds", "wake", "rest_port", "grpc_port", "served_ago")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_HELD_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    REST_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    SERVED_AGO_FIELD_NUMBER: _ClassVar[int]
    version: int
    namespace: str
    name: str
    held: int
    average_held: float
    arrived: float
    forwarded: float
    held_bytes: int
    oldest_seconds: float
    wake: bool
    rest_port: int
    grpc_port: int
    served_ago: float
    def __init__(self, version: _Optional[int] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., held: _Optional[int] = ..., average_held: _Optional[float] = ..., arrived: _Optional[float] = ..., forwarded: _Optional[float] = ..., held_bytes: _Optional[int] = ..., oldest_seconds: _Optional[float] = ..., wake: _Optional[bool] = ..., rest_port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., served_ago: _Optional[float] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("whole", "assignments", "sources")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    whole: bool
    assignments: _containers.RepeatedCompositeFieldContainer[HoldAssignment]
    sources: _containers.ScalarMap[str, str]
    def __init__(self, whole: _Optional[bool] = ..., assignments: _Optional[_Iterable[_Union[HoldAssignment, _Mapping]]] = ..., sources: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HoldAssignment(_message.Message):
    __slots__ = ("version", "namespace", "name", "public_name", "state", "rest_port", "grpc_port", "tls", "endpoints", "limits", "clients", "hopeless", "share", "gone", "waits_for")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REST_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    HOPELESS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    version: int
    namespace: str
    name: str
    public_name: str
    state: HoldState
    rest_port: int
    grpc_port: int
    tls: bool
    endpoints: _containers.RepeatedCompositeFieldContainer[HoldEndpoint]
    limits: HoldLimits
    clients: _containers.RepeatedScalarFieldContainer[str]
    hopeless: str
    share: int
    gone: bool
    waits_for: str
    def __init__(self, version: _Optional[int] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., public_name: _Optional[str] = ..., state: _Optional[_Union[HoldState, str]] = ..., rest_port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., tls: _Optional[bool] = ..., endpoints: _Optional[_Iterable[_Union[HoldEndpoint, _Mapping]]] = ..., limits: _Optional[_Union[HoldLimits, _Mapping]] = ..., clients: _Optional[_Iterable[str]] = ..., hopeless: _Optional[str] = ..., share: _Optional[int] = ..., gone: _Optional[bool] = ..., waits_for: _Optional[str] = ...) -> None: ...

class HoldLimits(_message.Message):
    __slots__ = ("requests", "bytes", "seconds", "wakes_per_second", "wake_burst")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAKES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WAKE_BURST_FIELD_NUMBER: _ClassVar[int]
    requests: int
    bytes: int
    seconds: float
    wakes_per_second: float
    wake_burst: int
    def __init__(self, requests: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., wakes_per_second: _Optional[float] = ..., wake_burst: _Optional[int] = ...) -> None: ...

class HoldEndpoint(_message.Message):
    __slots__ = ("uid", "name", "address", "rest_port", "grpc_port", "slots", "ready", "soon")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REST_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SOON_FIELD_NUMBER: _ClassVar[int]
    uid: str
    name: str
    address: str
    rest_port: int
    grpc_port: int
    slots: int
    ready: bool
    soon: bool
    def __init__(self, uid: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., rest_port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., slots: _Optional[int] = ..., ready: _Optional[bool] = ..., soon: _Optional[bool] = ...) -> None: ...
