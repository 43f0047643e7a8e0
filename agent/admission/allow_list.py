"""The verdict on every field of Triton's ModelConfig. A test goes through the descriptor: a field that a
newer Triton adds has none, and is refused until it gets one.

Bounds are far above what models use, and below what costs Triton, which all tenants of a node share, its
memory or its time: it allocates and loops by these numbers before it looks at them.
"""

from collections.abc import Mapping

from agent.admission.settings import Integer
from agent.admission.verdicts import (
    Inside,
    Keep,
    Many,
    Named,
    Number,
    OneOf,
    Parts,
    Real,
    Refused,
    Table,
    Text,
    Understood,
    Written,
)
from berth.triton.wire import model_config_pb2 as pb

# Tensors: Triton multiplies dimensions in 64 bits; what fits a GPU has fewer elements by far.
MAX_ELEMENTS = 2**31
MAX_RANK = 16
# Each tensor of a model is looked at for each request; recommenders have some hundreds.
MAX_TENSORS = 4096
MAX_BATCH = 65_536
# Each slot of a sequence batcher is a queue that Triton makes at the load. As all that follows but the
# versions it counts for each instance of each version that is served.
MAX_SEQUENCE_SLOTS = 4096
MAX_INSTANCES = 64
MAX_SERVED_VERSIONS = 32
# Made in host memory before the model serves.
MAX_WARMUP_BYTES = 512 * 1024**2
MAX_WARMUP_RUNS = 1000
MAX_STATE_BYTES = 256 * 1024**2
# Triton keeps every line of a file of labels, once for each output that names it.
MAX_LABEL_BYTES = 64 * 1024**2
# Profiles of a TensorRT plan, by number.
MAX_PROFILE = 9999
_MINUTE_MICROSECONDS = 60 * 10**6
_DAY_MICROSECONDS = 24 * 60 * _MINUTE_MICROSECONDS

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_NAME = Text(1024)
_DIMENSION = Number(1, MAX_ELEMENTS, also=-1)
_SIZE = Number(1, MAX_ELEMENTS)
_TENSOR_NAMES = Many(MAX_TENSORS, _NAME)
_BATCH = Number(1, MAX_BATCH)
_NO_OTHERS = "leave it out: a pod is one model, and this names other models of the server"
_NO_AGENTS = "leave it out: repository agents change the model's files after they have been judged"


def _enum(name: str) -> OneOf:
    """Every value of an enum of ModelConfig's file."""
    values = _ENUMS[name].values
    return OneOf(tuple(value.name for value in values), tuple(value.number for value in values))


_ENUMS = {
    "DataType": pb.DESCRIPTOR.enum_types_by_name["DataType"],
    "Format": pb.ModelInput.DESCRIPTOR.enum_types_by_name["Format"],
    "BatchInput.Kind": pb.BatchInput.DESCRIPTOR.enum_types_by_name["Kind"],
    "BatchOutput.Kind": pb.BatchOutput.DESCRIPTOR.enum_types_by_name["Kind"],
    "Priority": pb.ModelOptimizationPolicy.DESCRIPTOR.enum_types_by_name["ModelPriority"],
    "TimeoutAction": pb.ModelQueuePolicy.DESCRIPTOR.enum_types_by_name["TimeoutAction"],
    "Control.Kind": pb.ModelSequenceBatching.Control.DESCRIPTOR.enum_types_by_name["Kind"],
    "Instance.Kind": pb.ModelInstanceGroup.DESCRIPTOR.enum_types_by_name["Kind"],
}
_TYPE = _enum("DataType")
_EITHER = Keep()

TABLE: Table = {
    "ModelConfig": {
        "name": Written("the pod's model"),
        "platform": Text(64, r"[a-z0-9_]+", "a name like 'tensorrt_plan'"),
        "backend": Text(64, r"[a-z0-9_]+", "a name like 'python'"),
        "runtime": Written("nothing: Triton takes the backend's own library"),
        "version_policy": Parts(),
        "max_batch_size": Number(0, MAX_BATCH),
        "input": Many(MAX_TENSORS, Parts()),
        "output": Many(MAX_TENSORS, Parts()),
        "batch_input": Many(64, Parts()),
        "batch_output": Many(64, Parts()),
        "optimization": Parts(),
        "dynamic_batching": Parts(),
        "sequence_batching": Parts(),
        "ensemble_scheduling": Refused(_NO_OTHERS),
        "instance_group": Many(16, Parts()),
        "default_model_filename": Inside(),
        "cc_model_filenames": Named(
            16, Text(8, r"[0-9]+\.[0-9]+", "a compute capability like '8.6'"), Inside()
        ),
        # Triton makes labels of them with '_' before, and dies of a name that Prometheus does not take or
        # keeps for itself, as all that begin with '__'.
        "metric_tags": Named(
            16,
            Text(64, r"[a-zA-Z0-9][a-zA-Z0-9_]*", "a letter or digit, and more of them and '_',"),
            Text(128),
        ),
        "parameters": Named(256, _NAME, Parts()),
        "model_warmup": Many(32, Parts()),
        "model_operations": Parts(),
        "model_transaction_policy": Parts(),
        "model_repository_agents": Refused(_NO_AGENTS),
        "response_cache": Parts(),
        "model_metrics": Parts(),
    },
    "ModelVersionPolicy": {"latest": Parts(), "all": Parts(), "specific": Parts()},
    "ModelVersionPolicy.Latest": {"num_versions": Number(1, MAX_SERVED_VERSIONS)},
    "ModelVersionPolicy.All": {},
    "ModelVersionPolicy.Specific": {"versions": Many(MAX_SERVED_VERSIONS, Number(0, _INT64))},
    "ModelInput": {
        "name": _NAME,
        "data_type": _TYPE,
        "format": _enum("Format"),
        "dims": Many(MAX_RANK, _DIMENSION),
        "reshape": Parts(),
        "is_shape_tensor": _EITHER,
        "allow_ragged_batch": _EITHER,
        "optional": _EITHER,
        "is_non_linear_format_io": _EITHER,
    },
    "ModelTensorReshape": {"shape": Many(MAX_RANK, _DIMENSION)},
    "ModelOutput": {
        "name": _NAME,
        "data_type": _TYPE,
        "dims": Many(MAX_RANK, _DIMENSION),
        "reshape": Parts(),
        "label_filename": Inside(),
        "is_shape_tensor": _EITHER,
        "is_non_linear_format_io": _EITHER,
    },
    "BatchInput": {
        "kind": _enum("BatchInput.Kind"),
        "target_name": _TENSOR_NAMES,
        "data_type": _TYPE,
        "source_input": _TENSOR_NAMES,
    },
    "BatchOutput": {
        "target_name": _TENSOR_NAMES,
        "kind": _enum("BatchOutput.Kind"),
        "source_input": _TENSOR_NAMES,
    },
    "ModelOptimizationPolicy": {
        "graph": Parts(),
        "priority": _enum("Priority"),
        "cuda": Parts(),
        "execution_accelerators": Parts(),
        "input_pinned_memory": Parts(),
        "output_pinned_memory": Parts(),
        "gather_kernel_buffer_threshold": Number(0, 2**32 - 1),
        "eager_batching": _EITHER,
    },
    "ModelOptimizationPolicy.Graph": {"level": Number(-1, 99)},
    "ModelOptimizationPolicy.Cuda": {
        "graphs": _EITHER,
        "busy_wait_events": _EITHER,
        # Each is captured, and kept in GPU memory, at the load.
        "graph_spec": Many(64, Parts()),
        "output_copy_stream": _EITHER,
    },
    "ModelOptimizationPolicy.Cuda.GraphSpec": {
        "batch_size": Number(0, MAX_BATCH),
        "input": Named(MAX_TENSORS, _NAME, Parts()),
        "graph_lower_bound": Parts(),
    },
    # The TensorRT backend reads each from text by `stoi` (instance_state.cc), which ends Triton beyond 32 bits.
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape": {"dim": Many(MAX_RANK, Number(1, _INT32))},
    "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound": {
        "batch_size": Number(0, MAX_BATCH),
        "input": Named(MAX_TENSORS, _NAME, Parts()),
    },
    "ModelOptimizationPolicy.ExecutionAccelerators": {
        "gpu_execution_accelerator": Many(4, Parts()),
        "cpu_execution_accelerator": Many(4, Parts()),
    },
    # Which of them, and with which parameters: `backends.ACCELERATORS`.
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator": {
        "name": Text(64),
        "parameters": Named(32, Text(64), Text(256)),
    },
    "ModelOptimizationPolicy.PinnedMemoryBuffer": {"enable": _EITHER},
    "ModelDynamicBatching": {
        "preferred_batch_size": Many(64, _BATCH),
        "max_queue_delay_microseconds": Number(0, _MINUTE_MICROSECONDS),
        "preserve_ordering": _EITHER,
        # Triton makes a queue for each.
        "priority_levels": Number(0, 256),
        "default_priority_level": Number(0, 256),
        "default_queue_policy": Parts(),
        "priority_queue_policy": Named(256, Number(1, 256), Parts()),
    },
    "ModelQueuePolicy": {
        "timeout_action": _enum("TimeoutAction"),
        "default_timeout_microseconds": Number(0, _DAY_MICROSECONDS),
        "allow_timeout_override": _EITHER,
        "max_queue_size": Number(0, 1_000_000),
    },
    "ModelSequenceBatching": {
        "direct": Parts(),
        "oldest": Parts(),
        "max_sequence_idle_microseconds": Number(0, _DAY_MICROSECONDS),
        "control_input": Many(64, Parts()),
        "state": Many(256, Parts()),
        "iterative_sequence": _EITHER,
    },
    "ModelSequenceBatching.StrategyDirect": {
        "max_queue_delay_microseconds": Number(0, _MINUTE_MICROSECONDS),
        "minimum_slot_utilization": Real(),
    },
    "ModelSequenceBatching.StrategyOldest": {
        "max_candidate_sequences": Number(0, MAX_SEQUENCE_SLOTS),
        "preferred_batch_size": Many(64, _BATCH),
        "max_queue_delay_microseconds": Number(0, _MINUTE_MICROSECONDS),
        "preserve_ordering": _EITHER,
    },
    "ModelSequenceBatching.ControlInput": {"name": _NAME, "control": Many(8, Parts())},
    "ModelSequenceBatching.Control": {
        "kind": _enum("Control.Kind"),
        "int32_false_true": Many(2, Number(-_INT32 - 1, _INT32)),
        "fp32_false_true": Many(2, Real()),
        "bool_false_true": Many(2, _EITHER),
        "data_type": _TYPE,
    },
    "ModelSequenceBatching.State": {
        "input_name": _NAME,
        "output_name": _NAME,
        "data_type": _TYPE,
        "dims": Many(MAX_RANK, _DIMENSION),
        "initial_state": Many(8, Parts()),
        "use_same_buffer_for_input_output": _EITHER,
        "use_growable_memory": _EITHER,
    },
    "ModelSequenceBatching.InitialState": {
        "data_type": _TYPE,
        "dims": Many(MAX_RANK, _SIZE),
        "zero_data": _EITHER,
        "data_file": Inside(),
        "name": _NAME,
    },
    "ModelEnsembling": {
        "step": Refused(_NO_OTHERS),
        "max_inflight_requests": Refused(_NO_OTHERS),
    },
    "ModelEnsembling.Step": {
        "model_name": Refused(_NO_OTHERS),
        "model_version": Refused(_NO_OTHERS),
        "input_map": Refused(_NO_OTHERS),
        "output_map": Refused(_NO_OTHERS),
        "model_namespace": Refused(_NO_OTHERS),
    },
    "ModelInstanceGroup": {
        "name": Text(128),
        "kind": _enum("Instance.Kind"),
        "count": Number(0, MAX_INSTANCES),
        "rate_limiter": Parts(),
        "gpus": Many(64, Written("the GPUs that the binder has chosen")),
        "secondary_devices": Refused("leave it out: only GPUs are placed"),
        "profile": Many(64, Understood(Integer(0, MAX_PROFILE))),
        "passive": _EITHER,
        "host_policy": Text(64, r"[\w.-]*", "the name of a host policy"),
    },
    "ModelInstanceGroup.SecondaryDevice": {
        "kind": Refused("leave it out: only GPUs are placed"),
        "device_id": Refused("leave it out: only GPUs are placed"),
    },
    "ModelRateLimiter": {"resources": Many(16, Parts()), "priority": Number(0, 1_000_000)},
    # A global resource is shared by all models: one that claims more of it than there is would stop the others.
    "ModelRateLimiter.Resource": {"name": Text(128), "global": _EITHER, "count": Number(0, 1024)},
    "ModelParameter": {"string_value": Text(64 * 1024)},
    "ModelWarmup": {
        "name": _NAME,
        "batch_size": Number(0, 4096),
        "inputs": Named(MAX_TENSORS, _NAME, Parts()),
        "count": Number(0, MAX_WARMUP_RUNS),
    },
    "ModelWarmup.Input": {
        "data_type": _TYPE,
        "dims": Many(MAX_RANK, _SIZE),
        "zero_data": _EITHER,
        "random_data": _EITHER,
        "input_data_file": Inside(),
    },
    "ModelOperations": {
        "op_library_filename": Refused(
            "leave it out: Triton opens such a library wherever on the node its name leads"
        )
    },
    "ModelTransactionPolicy": {"decoupled": _EITHER},
    "ModelRepositoryAgents": {"agents": Refused(_NO_AGENTS)},
    "ModelRepositoryAgents.Agent": {"name": Refused(_NO_AGENTS), "parameters": Refused(_NO_AGENTS)},
    "ModelResponseCache": {"enable": _EITHER},
    "ModelMetrics": {"metric_control": Many(16, Parts())},
    "ModelMetrics.MetricControl": {"metric_identifier": Parts(), "histogram_options": Parts()},
    "ModelMetrics.MetricControl.MetricIdentifier": {
        "family": Text(128, r"[a-zA-Z_:][a-zA-Z0-9_:]*", "the name of a metric")
    },
    "ModelMetrics.MetricControl.HistogramOptions": {"buckets": Many(64, Real())},
}

# What a value takes of memory; a string at least its length.
ITEM_BYTES: Mapping[str, int] = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 1,
    "TYPE_INT8": 1,
    "TYPE_UINT16": 2,
    "TYPE_INT16": 2,
    "TYPE_FP16": 2,
    "TYPE_BF16": 2,
    "TYPE_UINT32": 4,
    "TYPE_INT32": 4,
    "TYPE_FP32": 4,
    "TYPE_STRING": 4,
    "TYPE_UINT64": 8,
    "TYPE_INT64": 8,
    "TYPE_FP64": 8,
}
