from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_MODE_UNSPECIFIED: _ClassVar[RouteMode]
    ROUTE_MODE_PROXY: _ClassVar[RouteMode]
    ROUTE_MODE_SERVE: _ClassVar[RouteMode]
ROUTE_MODE_UNSPECIFIED: RouteMode
ROUTE_MODE_PROXY: RouteMode
ROUTE_MODE_SERVE: RouteMode

class ControlRequest(_message.Message):
    __slots__ = ("hello", "reports")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    hello: ActivatorHello
    reports: ModelReports
    def __init__(self, hello: _Optional[_Union[ActivatorHello, _Mapping]] = ..., reports: _Optional[_Union[ModelReports, _Mapping]] = ...) -> None: ...

class ActivatorHello(_message.Message):
    __slots__ = ("address", "draining")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    address: str
    draining: bool
    def __init__(self, address: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class ModelReports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[ModelReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[ModelReport, _Mapping]]] = ...) -> None: ...

class ModelReport(_message.Message):
    __slots__ = ("version", "namespace", "name", "buffered", "average_buffered", "arrived", "forwarded", "buffered_bytes", "oldest_seconds", "cold_start", "rest_port", "grpc_port", "served_ago")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_BUFFERED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLD_START_FIELD_NUMBER: _ClassVar[int]
    REST_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    SERVED_AGO_FIELD_NUMBER: _ClassVar[int]
    version: int
    namespace: str
    name: str
    buffered: int
    average_buffered: float
    arrived: float
    forwarded: float
    buffered_bytes: int
    oldest_seconds: float
    cold_start: bool
    rest_port: int
    grpc_port: int
    served_ago: float
    def __init__(self, version: _Optional[int] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., buffered: _Optional[int] = ..., average_buffered: _Optional[float] = ..., arrived: _Optional[float] = ..., forwarded: _Optional[float] = ..., buffered_bytes: _Optional[int] = ..., oldest_seconds: _Optional[float] = ..., cold_start: _Optional[bool] = ..., rest_port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., served_ago: _Optional[float] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("snapshot", "assignments", "client_addresses")
    class ClientAddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    assignments: _containers.RepeatedCompositeFieldContainer[ModelAssignment]
    client_addresses: _containers.ScalarMap[str, str]
    def __init__(self, snapshot: _Optional[bool] = ..., assignments: _Optional[_Iterable[_Union[ModelAssignment, _Mapping]]] = ..., client_addresses: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ModelAssignment(_message.Message):
    __slots__ = ("version", "namespace", "name", "public_name", "mode", "rest_port", "grpc_port", "tls", "endpoints", "limits", "clients", "unavailable", "activators", "removed", "waiting_for")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REST_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATORS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    version: int
    namespace: str
    name: str
    public_name: str
    mode: RouteMode
    rest_port: int
    grpc_port: int
    tls: bool
    endpoints: _containers.RepeatedCompositeFieldContainer[ReplicaEndpoint]
    limits: BufferLimits
    clients: _containers.RepeatedScalarFieldContainer[str]
    unavailable: str
    activators: int
    removed: bool
    waiting_for: str
    def __init__(self, version: _Optional[int] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., public_name: _Optional[str] = ..., mode: _Optional[_Union[RouteMode, str]] = ..., rest_port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., tls: _Optional[bool] = ..., endpoints: _Optional[_Iterable[_Union[ReplicaEndpoint, _Mapping]]] = ..., limits: _Optional[_Union[BufferLimits, _Mapping]] = ..., clients: _Optional[_Iterable[str]] = ..., unavailable: _Optional[str] = ..., activators: _Optional[int] = ..., removed: _Optional[bool] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class BufferLimits(_message.Message):
    __slots__ = ("requests", "bytes", "seconds", "cold_starts_per_second", "cold_start_burst")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLD_STARTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    COLD_START_BURST_FIELD_NUMBER: _ClassVar[int]
    requests: int
    bytes: int
    seconds: float
    cold_starts_per_second: float
    cold_start_burst: int
    def __init__(self, requests: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., cold_starts_per_second: _Optional[float] = ..., cold_start_burst: _Optional[int] = ...) -> None: ...

class ReplicaEndpoint(_message.Message):
    __slots__ = ("uid", "name", "address", "rest_port", "grpc_port", "slots", "ready", "nearly_ready")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REST_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NEARLY_READY_FIELD_NUMBER: _ClassVar[int]
    uid: str
    name: str
    address: str
    rest_port: int
    grpc_port: int
    slots: int
    ready: bool
    nearly_ready: bool
    def __init__(self, uid: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., rest_port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., slots: _Optional[int] = ..., ready: _Optional[bool] = ..., nearly_ready: _Optional[bool] = ...) -> None: ...
