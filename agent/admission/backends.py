"""What Berth knows of Triton's backends, as data: the files that each needs, its parameters, where it runs,
and whether its models are programs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_SWITCH = re.compile(r"(?i)true|false|yes|no|on|off|[01]")
_WORD = re.compile(r"[\w.,:;+ -]{0,128}", re.ASCII)
# A thread costs Triton its stack, and every model of the node some of its cores.
_THREADS = 128

Check = Callable[[str], str | None]  # what would be right, if the value is not


@dataclass(frozen=True)
class Backend:
    """One backend.

    `files`: names in each version directory, of which one group must be there completely; each may be a
    directory. Empty: the backend has no name of its own for its files, or needs none.
    `is_program`: its models are programs, or lead it to files that they name: whoever wrote one decides
    what Triton does.
    `kinds`: the kinds of instances that it can run; the first is that of a model that names none.
    `parameters`: which it takes; None: the model's own code reads them, whatever they are.
    """

    files: tuple[tuple[str, ...], ...] = ()
    is_program: bool = True
    kinds: tuple[str, ...] = ("KIND_GPU", "KIND_CPU", "KIND_MODEL")
    parameters: Mapping[str, Check] | None = field(default=None)


def _switch(value: str) -> str | None:
    return None if _SWITCH.fullmatch(value) else "true or false"


def _word(value: str) -> str | None:
    return None if _WORD.fullmatch(value) and ".." not in value else "a word of at most 128 characters"


def _number(lowest: float, highest: float) -> Check:
    def check(value: str) -> str | None:
        try:
            fits = len(value) <= 32 and lowest <= float(value) <= highest
        except ValueError:
            fits = False
        return None if fits else f"a number from {lowest:g} to {highest:g}"

    return check


def _streams(value: str) -> str | None:
    by_word = value.removeprefix("CPU_THROUGHPUT_") in ("AUTO", "NUMA")
    return (
        None
        if by_word or _number(-1, _THREADS)(value) is None
        else f"AUTO, NUMA or a number up to {_THREADS}"
    )


_threads, _any_number = _number(0, _THREADS), _number(-1, 2**63)

_ONNXRUNTIME: Mapping[str, Check] = {
    "intra_op_thread_count": _threads,
    "inter_op_thread_count": _threads,
    "execution_mode": _number(0, 1),
    "level": _number(-1, 99),
    "enable_mem_arena": _switch,
    "enable_mem_pattern": _switch,
    "memory.enable_memory_arena_shrinkage": _word,
    "arena_extend_strategy": _word,
    "gpu_mem_limit": _any_number,
    "cudnn_conv_algo_search": _number(0, 2),
    "cudnn_conv_use_max_workspace": _switch,
    "cudnn_conv1d_pad_to_nc1d": _switch,
    "do_copy_in_default_stream": _switch,
    "use_tf32": _switch,
    "session.use_device_allocator_for_initializers": _switch,
    "session.disable_prepacking": _switch,
    "session.intra_op.allow_spinning": _switch,
    "session.inter_op.allow_spinning": _switch,
}
_OPENVINO: Mapping[str, Check] = {
    "CPU_THREADS_NUM": _threads,
    "INFERENCE_NUM_THREADS": _threads,
    "COMPILATION_NUM_THREADS": _threads,
    "CPU_THROUGHPUT_STREAMS": _streams,
    "NUM_STREAMS": _streams,
    "HINT_BF16": _switch,
    "ENFORCE_BF16": _switch,
    "PERFORMANCE_HINT": _word,
    "ENABLE_BATCH_PADDING": _switch,
    "SKIP_OV_DYNAMIC_BATCHSIZE": _switch,
    "RESHAPE_IO_LAYERS": _switch,
}
_FIL: Mapping[str, Check] = {
    "model_type": _word,
    "predict_proba": _switch,
    "output_class": _switch,
    "is_classifier": _switch,
    "threshold": _number(-1e38, 1e38),
    "algo": _word,
    "storage_type": _word,
    "blocks_per_sm": _number(0, 4096),
    "threads_per_tree": _number(1, 4096),
    "chunk_size": _number(1, 2**16),
    "transfer_threshold": _any_number,
    "use_experimental_optimizations": _switch,
    "xgboost_allow_unknown_field": _switch,
}

BACKENDS: Mapping[str, Backend] = {
    "python": Backend(files=(("model.py",),)),
    "onnxruntime": Backend(
        files=(("model.onnx",),), is_program=False, kinds=("KIND_GPU", "KIND_CPU"), parameters=_ONNXRUNTIME
    ),
    # Triton takes plans that carry code only with --backend-config=tensorrt,version-compatible=true.
    "tensorrt": Backend(
        files=(("model.plan",),),
        is_program=False,
        kinds=("KIND_GPU",),
        parameters={"execution_context_allocation_strategy": _word},
    ),
    "openvino": Backend(
        files=(("model.xml", "model.bin"), ("model.onnx",)),
        is_program=False,
        kinds=("KIND_CPU",),
        parameters=_OPENVINO,
    ),
    "fil": Backend(
        files=(("xgboost.model",), ("xgboost.json",), ("xgboost.ubj",), ("model.txt",), ("checkpoint.tl",)),
        is_program=False,
        kinds=("KIND_GPU", "KIND_CPU"),
        parameters=_FIL,
    ),
    # TorchScript and TensorFlow graphs have operators that read and write any file; DALI's name plugins.
    "pytorch": Backend(files=(("model.pt",), ("model.pt2",), ("model.py",))),
    "tensorflow": Backend(files=(("model.savedmodel",), ("model.graphdef",))),
    "dali": Backend(files=(("model.dali",), ("dali.py",)), kinds=("KIND_GPU", "KIND_CPU")),
}
# Of a backend that the node has and Berth does not know: its models may be programs.
UNKNOWN = Backend()

# They take weights from files that a graph names.
READ_ONNX = frozenset({"onnxruntime", "openvino"})

PLATFORMS: Mapping[str, str] = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
}
# Without a backend in config.pbtxt the file tells it, as it does Triton, where only one has such a file.
BY_FILE: Mapping[str, str] = {
    "model.plan": "tensorrt",
    "model.onnx": "onnxruntime",
    "model.xml": "openvino",
    "model.pt": "pytorch",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.py": "python",
}


# What runs on a graph instead of ONNX Runtime's own operators, and which settings of it are taken: those that
# name a file are not among them.
ACCELERATORS: Mapping[str, Mapping[str, Check]] = {
    "tensorrt": {
        "precision_mode": _word,
        "max_workspace_size_bytes": _any_number,
        "max_partition_iterations": _number(1, 10_000),
        "trt_max_partition_iterations": _number(1, 10_000),
        "minimum_segment_size": _number(1, 10_000),
        "trt_min_subgraph_size": _number(1, 10_000),
        "max_cached_engines": _number(1, 1000),
        "trt_layer_norm_fp32_fallback": _switch,
        "trt_build_heuristics_enable": _switch,
        "trt_builder_optimization_level": _number(0, 5),
        "trt_cuda_graph_enable": _switch,
    },
    "cuda": {
        "cudnn_conv_algo_search": _number(0, 2),
        "cudnn_conv_use_max_workspace": _switch,
        "use_tf32": _switch,
        "prefer_nhwc": _switch,
    },
    "openvino": {"num_of_threads": _threads},
    "auto_mixed_precision": {},
    "gpu_io": {},
}
