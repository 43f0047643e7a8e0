"""The configurations that Triton's own documentation, its examples and those of others show are taken, and mean
the same afterwards."""

from dataclasses import dataclass

import pytest
from google.protobuf import text_format

from agent.admission import ModelFiles, NodeRules, judge
from agent.config import DEFAULT_CAPABILITIES
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule
from berth.triton.wire import model_config_pb2 as pb

RULES = NodeRules(frozenset({*DEFAULT_CAPABILITIES, "fil", "vllm", "tensorrtllm"}), CodeRule.NAMESPACE)


@dataclass(frozen=True)
class Ordinary:
    config: str
    files: tuple[str, ...]
    has_code: bool = False


ONNX, PLAN, PYTHON, TREES = ("1/model.onnx",), ("1/model.plan",), ("1/model.py",), ("1/xgboost.json",)
TEXT = 'input [ { name: "input.1" data_type: TYPE_FP32 dims: [ 1, 32, 100 ] } ]' + (
    'output [ { name: "308" data_type: TYPE_FP32 dims: [ 26, 37 ] } ]'
)
FIL = """backend: "fil" max_batch_size: 32768
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 500 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 2 ] } ] """

ORDINARY = {
    "densenet": Ordinary(
        """name: "m" platform: "onnxruntime_onnx" max_batch_size : 0
        input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ]
          reshape { shape: [ 1, 3, 224, 224 ] } } ]
        output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ]
          reshape { shape: [ 1, 1000, 1, 1 ] } label_filename: "densenet_labels.txt" } ]""",
        (*ONNX, "densenet_labels.txt"),
    ),
    "a sequence": Ordinary(
        """name: "m" platform: "onnxruntime_onnx" max_batch_size: 8
        sequence_batching { control_input [
          { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
          { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] } ] }
        input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] instance_group [ { kind: KIND_CPU } ]""",
        ONNX,
    ),
    "the oldest sequences": Ordinary(
        """backend: "python" max_batch_size: 8
        sequence_batching { max_sequence_idle_microseconds: 10000000
          oldest { max_candidate_sequences: 1024 max_queue_delay_microseconds: 10000 }
          control_input [ { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
            { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }
        input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        parameters [ { key: "execute_delay_ms" value: { string_value: "3" } } ]
        instance_group [ { count: 2 kind: KIND_CPU } ]""",
        PYTHON,
        has_code=True,
    ),
    "implicit state": Ordinary(
        """backend: "onnxruntime" max_batch_size: 8
        sequence_batching { state [ { input_name: "INPUT_STATE" output_name: "OUTPUT_STATE" data_type: TYPE_INT32
          dims: [ -1 ] initial_state: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "initial" } } ] }""",
        ONNX,
    ),
    "graphs compiled by TensorRT": Ordinary(
        'backend: "onnxruntime" max_batch_size: 16 '
        + TEXT
        + """model_warmup { name: "text_recognition" batch_size: 16 inputs: { key: "input.1" value: {
          data_type: TYPE_FP32 dims: 1 dims: 32 dims: 100 zero_data: true } } }
        optimization { graph : { level : 1 } execution_accelerators { gpu_execution_accelerator : [ {
          name : "tensorrt", parameters { key: "precision_mode" value: "FP16" },
          parameters { key: "max_workspace_size_bytes" value: "1073741824" } }] } }""",
        ONNX,
    ),
    "settings of CUDA": Ordinary(
        'backend: "onnxruntime" max_batch_size: 16 '
        + TEXT
        + """parameters { key: "cudnn_conv_algo_search" value: { string_value: "0" } }
        parameters { key: "gpu_mem_limit" value: { string_value: "4294967200" } }""",
        ONNX,
    ),
    "ONNX with OpenVINO": Ordinary(
        'platform: "onnxruntime_onnx" max_batch_size: 16 '
        + TEXT
        + 'optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "openvino" } ] }}',
        ONNX,
    ),
    "threads of ONNX": Ordinary(
        """backend: "onnxruntime"
        parameters { key: "intra_op_thread_count" value: { string_value: "0" } }
        parameters { key: "execution_mode" value: { string_value: "0" } }
        parameters { key: "inter_op_thread_count" value: { string_value: "0" } }
        parameters { key: "enable_mem_arena" value: { string_value: "1" } }
        parameters { key: "enable_mem_pattern" value: { string_value: "1" } }
        parameters { key: "memory.enable_memory_arena_shrinkage" value: { string_value: "cpu:0;gpu:0" } }""",
        ONNX,
    ),
    "a plan, three times": Ordinary(
        """name: "m" platform: "tensorrt_plan" max_batch_size: 64
        input [ { name: "input_1" data_type: TYPE_FP32 dims: [ 3, 544, 960  ] } ]
        output [ { name: "output_bbox/BiasAdd" data_type: TYPE_FP32 dims: [ 12, 34, 60 ] },
          { name: "output_cov/Sigmoid" data_type: TYPE_FP32 dims: [ 3, 34, 60 ] } ]
        instance_group [ { count: 3 kind: KIND_GPU } ]""",
        PLAN,
    ),
    "a plan's profile": Ordinary(
        """platform: "tensorrt_plan" max_batch_size: 4
        dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 200000 }
        instance_group { count: 2 profile: "1" kind: KIND_GPU }""",
        PLAN,
    ),
    "CUDA graphs": Ordinary(
        """platform: "tensorrt_plan" max_batch_size: 64
        input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
        optimization { cuda { graphs: 1 busy_wait_events: 1 graph_spec { batch_size: 1 input { key: "input_ids"
          value { dim: [ 128 ] } } graph_lower_bound { batch_size: 1 input { key: "input_ids" value { dim: 16 } } } } } }""",
        PLAN,
    ),
    "TorchScript": Ordinary(
        """name: "m" platform: "pytorch_libtorch" max_batch_size: 32
        input [ { name: "input__0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3,224,224 ] } ]
        output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 1000 ] label_filename: "resnet_labels.txt" } ]
        parameters: { key: "INFERENCE_MODE" value: { string_value: "true" } }""",
        ("1/model.pt", "resnet_labels.txt"),
        has_code=True,
    ),
    "OpenVINO of ONNX": Ordinary('name: "m" backend: "openvino" default_model_filename: "model.onnx"', ONNX),
    "OpenVINO's streams": Ordinary(
        """backend: "openvino" max_batch_size: 0 instance_group [ { count: 2 kind: KIND_CPU } ]
        dynamic_batching { preferred_batch_size: [ 8, 16, 32 ] max_queue_delay_microseconds: 2000 }
        parameters: { key: "NUM_STREAMS" value: { string_value: "AUTO" } }
        parameters: { key: "INFERENCE_NUM_THREADS" value: { string_value: "4" } }
        parameters: { key: "PERFORMANCE_HINT" value: { string_value: "LATENCY" } }""",
        ("1/model.xml", "1/model.bin"),
    ),
    "trees": Ordinary(
        FIL
        + """instance_group [{ kind: KIND_AUTO }]
        parameters [ { key: "model_type" value: { string_value: "xgboost_json" } },
          { key: "predict_proba" value: { string_value: "true" } },
          { key: "output_class" value: { string_value: "true" } },
          { key: "threshold" value: { string_value: "0.5" } },
          { key: "algo" value: { string_value: "ALGO_AUTO" } },
          { key: "storage_type" value: { string_value: "AUTO" } },
          { key: "blocks_per_sm" value: { string_value: "0" } },
          { key: "use_experimental_optimizations" value: { string_value: "false" } } ]
        dynamic_batching { max_queue_delay_microseconds: 100 }""",
        TREES,
    ),
    "trees of a file of one's own": Ordinary(
        FIL + 'default_model_filename: "fraud.json" dynamic_batching {}', ("1/fraud.json",)
    ),
    "a python pipeline": Ordinary(
        """name: "m" backend: "python" max_batch_size: 8
        input [ { name: "prompt" data_type: TYPE_STRING dims: [1] } ]
        output [ { name: "generated_image" data_type: TYPE_FP32 dims: [ -1, -1, -1] } ]
        instance_group [ { kind: KIND_GPU } ]
        parameters: { key: "EXECUTION_ENV_PATH",
          value: {string_value: "$$TRITON_MODEL_DIRECTORY/python3.10.tar.gz"} }""",
        (*PYTHON, "python3.10.tar.gz"),
        has_code=True,
    ),
    "decoupled": Ordinary(
        """name: "m" backend: "python" max_batch_size: 0
        input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ 1 ]
          optional: true } ]
        output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        model_transaction_policy { decoupled: true } instance_group [ { count: 1 kind: KIND_CPU } ]""",
        PYTHON,
        has_code=True,
    ),
    "vLLM": Ordinary(
        'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]', ("1/model.json",), has_code=True
    ),
    "a ragged batch": Ordinary(
        """backend: "onnxruntime" max_batch_size: 16
        input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
        batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32
          source_input: "INPUT0" } ]
        dynamic_batching { max_queue_delay_microseconds: 100 }""",
        ONNX,
    ),
    "queues with priorities": Ordinary(
        """platform: "onnxruntime_onnx" max_batch_size: 4 version_policy: { all { }}
        dynamic_batching { preferred_batch_size: [ 4 ] priority_levels: 2 default_priority_level: 2
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000
            allow_timeout_override: true max_queue_size: 9 }
          priority_queue_policy { key: 1 value: { timeout_action: REJECT } } }
        response_cache { enable: true } metric_tags { key: "team" value: "a" }""",
        ONNX,
    ),
}


def asked_for(text: str) -> pb.ModelConfig:
    """What it says, but for the names of model and backend and the placement on GPUs, which are Berth's."""
    config = text_format.Parse(text, pb.ModelConfig())
    return without_ours(config)


def without_ours(config: pb.ModelConfig) -> pb.ModelConfig:
    for field in ("name", "backend", "instance_group"):
        config.ClearField(field)
    return config


@pytest.mark.parametrize("kind", sorted(ORDINARY))
def test_an_ordinary_model_is_taken_as_it_is(kind: str) -> None:
    one = ORDINARY[kind]
    admitted = judge(one.config.encode(), ModelFiles(dict.fromkeys(one.files, 9)), ModelName("m"), RULES)
    assert admitted.has_code is one.has_code
    groups = [(max(group.count, 1), list(group.profile)) for group in admitted.config.instance_group]
    asked = text_format.Parse(one.config, pb.ModelConfig()).instance_group
    assert groups == ([(max(group.count, 1), list(group.profile)) for group in asked] or [(1, [])])
    assert without_ours(admitted.config) == asked_for(one.config)
