"""The parameters that a backend reads, each as its reader takes it."""

import pytest

from agent.admission import InvalidModel, judge
from agent.admission.backends import BACKENDS
from berth.contract.ids import ModelName
from tests.fakes.admission import ALL_FILES, ALL_RULES, parameter, understood


@pytest.mark.parametrize(
    ("backend", "name", "value", "expected"),
    [
        ("onnxruntime", "arena_extend_strategy", "99999999999", None),
        ("onnxruntime", "arena_extend_strategy", "2", None),
        ("onnxruntime", "arena_extend_strategy", "1", "1"),
        ("onnxruntime", "intra_op_thread_count", "9999999999e-9", None),
        ("onnxruntime", "intra_op_thread_count", "99999e-3", None),
        ("onnxruntime", "intra_op_thread_count", "+08", "8"),
        ("onnxruntime", "enable_mem_arena", "Yes", "1"),
        ("onnxruntime", "gpu_mem_limit", "18446744073709551615", "18446744073709551615"),
        ("onnxruntime", "gpu_mem_limit", "18446744073709551616", None),
        ("onnxruntime", "memory.enable_memory_arena_shrinkage", "cpu:0;gpu:0", "cpu:0;gpu:0"),
        ("openvino", "INFERENCE_NUM_THREADS", "99999e-3", None),
        ("openvino", "NUM_STREAMS", "auto", "AUTO"),
        ("openvino", "NUM_STREAMS", "4", "4"),
        ("openvino", "HINT_BF16", "true", "YES"),
        ("openvino", "HINT_BF16", "NO", None),
        ("openvino", "ENABLE_BATCH_PADDING", "1", "YES"),
        ("fil", "threshold", "5e-1", "0.5"),
        ("fil", "threshold", "1e39", None),
        ("fil", "threshold", "1e-45", None),
        ("fil", "predict_proba", "TRUE", "true"),
        ("fil", "chunk_size", "99999999999", None),
        ("fil", "model_type", "xgboost_json", "xgboost_json"),
        ("fil", "model_type", "onnx", None),
        ("tensorrt", "execution_context_allocation_strategy", "static", "STATIC"),
        ("python", "FORCE_CPU_ONLY_INPUT_TENSORS", "YES", "yes"),
        ("python", "anything", "99999999999", "99999999999"),
        ("pytorch", "INTRA_OP_THREAD_COUNT", "99999999999", None),
        ("dali", "num_threads", "99999999999", None),
        ("tensorflow", "TF_NUM_INTRA_THREADS", "99999999999", None),
    ],
)
def test_a_parameter_is_written_as_its_reader_takes_it(
    backend: str, name: str, value: str, expected: str | None
) -> None:
    """node D1."""
    assert understood(*parameter(backend, name, value)) == expected


def test_a_number_that_does_not_go_is_reported_with_its_bounds() -> None:
    config, _ = parameter("onnxruntime", "intra_op_thread_count", "99999e-3")
    with pytest.raises(InvalidModel, match=r"'99999e-3'; a whole number from 0 to 128 is taken"):
        judge(config, ALL_FILES, ModelName("m"), ALL_RULES)


NAMES = {
    "python": "FORCE_CPU_ONLY_INPUT_TENSORS",
    "onnxruntime": "arena_extend_strategy cudnn_conv1d_pad_to_nc1d cudnn_conv_algo_search cudnn_conv_use_max_workspace "
    "do_copy_in_default_stream enable_mem_arena enable_mem_pattern execution_mode gpu_mem_limit inter_op_thread_count "
    "intra_op_thread_count level memory.enable_memory_arena_shrinkage session.disable_prepacking "
    "session.inter_op.allow_spinning session.intra_op.allow_spinning session.use_device_allocator_for_initializers use_tf32",
    "tensorrt": "execution_context_allocation_strategy",
    "openvino": "COMPILATION_NUM_THREADS CPU_THREADS_NUM CPU_THROUGHPUT_STREAMS ENABLE_BATCH_PADDING ENFORCE_BF16 HINT_BF16 "
    "INFERENCE_NUM_THREADS NUM_STREAMS PERFORMANCE_HINT RESHAPE_IO_LAYERS SKIP_OV_DYNAMIC_BATCHSIZE",
    "fil": "algo blocks_per_sm chunk_size is_classifier model_type output_class predict_proba storage_type threads_per_tree "
    "threshold transfer_threshold use_experimental_optimizations xgboost_allow_unknown_field",
}


@pytest.mark.parametrize("backend", sorted(NAMES))
def test_what_a_backend_calls_its_parameters(backend: str) -> None:
    """A name that is another is refused, or passed on unread to a program's code."""
    assert sorted(BACKENDS[backend].parameters) == NAMES[backend].split()
