"""Checks over several fields: products, sums, names that come twice, files that must be there."""

import math
from collections.abc import Iterable, Sequence

from agent.admission.allow_list import (
    ITEM_BYTES,
    MAX_ELEMENTS,
    MAX_INSTANCES,
    MAX_LABEL_BYTES,
    MAX_SEQUENCE_SLOTS,
    MAX_SERVED_VERSIONS,
    MAX_STATE_BYTES,
    MAX_WARMUP_BYTES,
    MAX_WARMUP_RUNS,
)
from agent.admission.backends import Backend
from agent.admission.errors import InvalidModel
from agent.admission.files import PYTHON_STUB, ModelFiles
from berth.triton.wire import model_config_pb2 as pb


def check_together(config: pb.ModelConfig, backend: Backend, files: ModelFiles, *, where: str) -> None:
    """Of a config whose instance groups have their counts. Raises InvalidModel."""
    versions = served_versions(config, files, where=where)
    instances = len(versions) * sum(group.count for group in config.instance_group)
    if instances > MAX_INSTANCES:
        raise InvalidModel(
            f"{where}instance_group: {instances} instances of {len(versions)} versions; at most {MAX_INSTANCES}"
        )
    _check_tensors(config, where)
    _check_batching(config, instances, where)
    _check_warmup(config, files, instances, where)
    _check_states(config, files, instances, where)
    _check_metrics(config, where)
    _check_files(config, backend, files, versions, where)
    _check_stub(config, files)


def served_versions(config: pb.ModelConfig, files: ModelFiles, *, where: str) -> list[int]:
    """The versions that Triton will serve of those that are there; one at least. Raises InvalidModel."""
    there = files.versions()
    policy = config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if not there:
        raise InvalidModel("there is no version directory: the model's files belong into one like '1'")
    if kind == "all":
        served = there
    elif kind == "specific":
        served = sorted(set(policy.specific.versions).intersection(there))
    else:
        served = there[-max(policy.latest.num_versions, 1) :]
    if not served:
        named = ", ".join(map(str, policy.specific.versions)) or "none"
        raise InvalidModel(
            f"{where}version_policy: of versions {named} none is there; there is {_some(there)}"
        )
    if len(served) > MAX_SERVED_VERSIONS:
        raise InvalidModel(
            f"{where}version_policy: {len(served)} versions; at most {MAX_SERVED_VERSIONS} are served"
        )
    return served


def _check_tensors(config: pb.ModelConfig, where: str) -> None:
    controls = config.sequence_batching.control_input
    _require_different([one.name for one in config.input] + [one.name for one in controls], f"{where}input")
    _require_different([one.name for one in config.output], f"{where}output")
    _check_each(config.input, f"{where}input")
    _check_each(config.output, f"{where}output")


def _check_each(tensors: Iterable[pb.ModelInput | pb.ModelOutput], where: str) -> None:
    for at, tensor in enumerate(tensors):
        place = f"{where}[{at}]"
        _require_name(tensor.name, place)
        _require_product(tensor.dims, f"{place}.dims")
        _require_product(tensor.reshape.shape, f"{place}.reshape.shape")


def _check_batching(config: pb.ModelConfig, instances: int, where: str) -> None:
    dynamic, sequences = config.dynamic_batching, config.sequence_batching
    for place, sizes in (
        ("dynamic_batching", dynamic.preferred_batch_size),
        ("sequence_batching.oldest", sequences.oldest.preferred_batch_size),
    ):
        if config.max_batch_size and max(sizes, default=0) > config.max_batch_size:
            raise InvalidModel(
                f"{where}{place}.preferred_batch_size: {max(sizes)} is more than "
                f"max_batch_size {config.max_batch_size}"
            )
    levels = dynamic.priority_levels
    used = [dynamic.default_priority_level, *dynamic.priority_queue_policy]
    if max(used) > levels:
        raise InvalidModel(
            f"{where}dynamic_batching: priority level {max(used)}, but priority_levels is {levels}"
        )
    if config.HasField("sequence_batching"):
        slots = sequences.oldest.max_candidate_sequences or config.max_batch_size
        if slots * instances > MAX_SEQUENCE_SLOTS:
            raise InvalidModel(
                f"{where}sequence_batching: {slots * instances} sequences at once; at most {MAX_SEQUENCE_SLOTS} "
                "are taken: lower max_batch_size, or set oldest.max_candidate_sequences"
            )


def _check_warmup(config: pb.ModelConfig, files: ModelFiles, instances: int, where: str) -> None:
    """Triton makes every sample for each instance before it serves, and keeps a file's bytes once for each
    of the batch."""
    total = runs = 0
    _require_different([sample.name for sample in config.model_warmup], f"{where}model_warmup")
    for at, sample in enumerate(config.model_warmup):
        place = f"{where}model_warmup[{at}]"
        runs += max(sample.count, 1)
        for name in sorted(sample.inputs):
            one = sample.inputs[name]
            shown = f"{place}.inputs[{name[:80]!r}]"
            size = _require_product(one.dims, f"{shown}.dims") * _item_bytes(one.data_type, shown)
            if one.WhichOneof("input_data_type") is None:
                raise InvalidModel(f"{shown}: zero_data, random_data or input_data_file is expected")
            if one.input_data_file:
                path = f"warmup/{one.input_data_file}"
                size = max(size, _require_file(files, path, f"{shown}.input_data_file"))
            total += size * max(sample.batch_size, 1) * instances
    if total > MAX_WARMUP_BYTES:
        raise InvalidModel(f"{where}model_warmup: {total} bytes; at most {MAX_WARMUP_BYTES} are taken")
    if runs > MAX_WARMUP_RUNS:
        raise InvalidModel(f"{where}model_warmup: {runs} runs; at most {MAX_WARMUP_RUNS} are taken")


def _check_states(config: pb.ModelConfig, files: ModelFiles, instances: int, where: str) -> None:
    states, total = config.sequence_batching.state, 0
    _require_different([state.input_name for state in states], f"{where}sequence_batching.state")
    for at, state in enumerate(states):
        place = f"{where}sequence_batching.state[{at}]"
        _require_product(state.dims, f"{place}.dims")
        for one in state.initial_state:
            shown = f"{place}.initial_state"
            size = _require_product(one.dims, f"{shown}.dims") * _item_bytes(one.data_type, shown)
            if one.data_file:
                path = f"initial_state/{one.data_file}"
                size = max(size, _require_file(files, path, f"{shown}.data_file"))
            total += size * instances
    if total > MAX_STATE_BYTES:
        raise InvalidModel(
            f"{where}sequence_batching.state: {total} bytes at first; at most {MAX_STATE_BYTES} are taken"
        )


def _check_metrics(config: pb.ModelConfig, where: str) -> None:
    """Prometheus' library throws at buckets that do not ascend, and Triton does not catch it."""
    for at, control in enumerate(config.model_metrics.metric_control):
        buckets = list(control.histogram_options.buckets)
        if buckets != sorted(set(buckets)):
            raise InvalidModel(f"{where}model_metrics.metric_control[{at}]: buckets must ascend")


def _check_files(
    config: pb.ModelConfig, backend: Backend, files: ModelFiles, versions: Sequence[int], where: str
) -> None:
    """A python model without its model.py stops Triton's load for minutes; others fail with less of a reason."""
    _check_labels(config, files, where)
    by_capability = [config.cc_model_filenames[one] for one in sorted(config.cc_model_filenames)]
    for version in versions:
        for name in by_capability:
            _require_there(files, [[f"{version}/{name}"]], f"{where}cc_model_filenames")
        if config.default_model_filename:
            named = f"{version}/{config.default_model_filename}"
            _require_there(files, [[named]], f"{where}default_model_filename")
        elif backend.files and not by_capability:
            groups = [[f"{version}/{name}" for name in group] for group in backend.files]
            _require_there(files, groups, f"backend {config.backend!r}")


def _check_stub(config: pb.ModelConfig, files: ModelFiles) -> None:
    """Files arrive without the right to be executed, and Triton waits for minutes for a stub that does not start."""
    if config.backend == "python" and files.has(PYTHON_STUB):
        raise InvalidModel(
            f"{PYTHON_STUB}: leave it out: python models run with the stub of this node's Triton"
        )


def _check_labels(config: pb.ModelConfig, files: ModelFiles, where: str) -> None:
    total = 0
    for at, output in enumerate(config.output):
        if output.label_filename:
            place = f"{where}output[{at}].label_filename"
            total += _require_file(files, output.label_filename, place)
            if total > MAX_LABEL_BYTES:
                raise InvalidModel(
                    f"{place}: {total} bytes of labels in all; at most {MAX_LABEL_BYTES} are taken"
                )


def _require_there(files: ModelFiles, groups: Sequence[Sequence[str]], place: str) -> None:
    if not any(all(files.has(path) for path in group) for group in groups):
        wanted = ", or ".join(" and ".join(path[:200] for path in group) for group in groups)
        raise InvalidModel(f"{place}: {wanted} is needed, and not there")


def _require_file(files: ModelFiles, path: str, place: str) -> int:
    """Its size in bytes. Raises InvalidModel."""
    if path not in files.sizes:
        raise InvalidModel(f"{place}: there is no file {path[:200]!r} in the model's directory")
    return files.sizes[path]


def _require_product(dims: Iterable[int], place: str) -> int:
    """The number of elements, with -1 as 1. Raises InvalidModel."""
    product = math.prod(size for size in dims if size > 0)
    if product > MAX_ELEMENTS:
        raise InvalidModel(f"{place}: {product} elements; at most {MAX_ELEMENTS} are taken")
    return product


def _require_name(name: str, place: str) -> None:
    if not name:
        raise InvalidModel(f"{place}: it has no name")


def _require_different(names: Iterable[str], place: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidModel(f"{place}: {name[:80]!r} comes twice")
        seen.add(name)


def _item_bytes(data_type: int, place: str) -> int:
    """Raises InvalidModel where no type is named."""
    size = ITEM_BYTES.get(pb.DataType.Name(data_type))
    if size is None:
        raise InvalidModel(f"{place}: a data_type like TYPE_FP32 is expected")
    return size


def _some(versions: Sequence[int]) -> str:
    shown = ", ".join(map(str, versions[:8]))
    return shown if len(versions) <= 8 else f"{shown}, … ({len(versions)} in all)"
