"""Instances: what a model says of them is kept, but for the GPUs, which the binder has chosen."""

from collections.abc import Sequence

from agent.admission.backends import Backend
from agent.admission.errors import InvalidModel
from berth.triton.wire import model_config_pb2 as pb

_Kind = pb.ModelInstanceGroup.Kind
_MINE_TO_PLACE = (_Kind.KIND_AUTO, _Kind.KIND_GPU)


def settle(config: pb.ModelConfig, backend: Backend, *, where: str) -> None:
    """Give every group a kind that the backend has and a count, and take its GPUs away.

    Triton's own default is an instance on every GPU, and two groups of one name are one to it. Raises
    InvalidModel.
    """
    if not config.instance_group:
        config.instance_group.add()
    for at, group in enumerate(config.instance_group):
        place = f"{where}instance_group[{at}]"
        group.kind = _kind(group.kind, backend, place)  # type: ignore[assignment]
        group.count = max(group.count, 1)
        del group.gpus[:]
    names = [group.name for group in config.instance_group if group.name]
    if len(set(names)) != len(names):
        raise InvalidModel(f"{where}instance_group: two groups have one name")
    if all(group.passive for group in config.instance_group):
        raise InvalidModel(f"{where}instance_group: all are passive; one that serves is needed")


def placed(config: pb.ModelConfig, ordinals: Sequence[int], *, kind: str) -> pb.ModelConfig:
    """A copy whose GPU instances are on these GPUs, by CUDA's numbers; on a node without GPUs of its own
    (`kind` KIND_CPU) they run on the CPU."""
    copy = pb.ModelConfig()
    copy.CopyFrom(config)
    for group in copy.instance_group:
        if group.kind in _MINE_TO_PLACE:
            group.kind = _Kind.Value(kind)  # type: ignore[assignment]
            if group.kind == _Kind.KIND_GPU:
                group.gpus.extend(ordinals)
    return copy


def _kind(asked: int, backend: Backend, place: str) -> int:
    """KIND_AUTO is what the backend likes best. Raises InvalidModel."""
    if asked == _Kind.KIND_AUTO:
        return int(_Kind.Value(backend.kinds[0]))
    name = _Kind.Name(asked)
    if name not in backend.kinds:
        raise InvalidModel(f"{place}.kind: {name}; this backend runs on {' or '.join(backend.kinds)}")
    return asked
