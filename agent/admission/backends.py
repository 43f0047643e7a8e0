"""What Berth knows of Triton's backends, as data: the files that each needs, its parameters, where it runs,
and whether its models are programs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.admission.settings import Choice, Either, Integer, ListOf, Real, Settings, Switch

# A thread costs Triton its stack, and every model of the node some of its cores.
_THREADS = 128
_UINT64 = 2**64 - 1


@dataclass(frozen=True)
class Backend:
    """One backend.

    `files`: names in each version directory, of which one group must be there completely; each may be a
    directory. Empty: the backend has no name of its own for its files, or needs none.
    `is_program`: its models are programs, or lead it to files that they name: their author decides
    what Triton does.
    `kinds`: the kinds of instances that it can run; the first is that of a model that names none.
    `parameters`: those that it reads itself, each with its type and bounds. Others are refused, but for those
    of a program, whose own code may read them.
    """

    files: tuple[tuple[str, ...], ...] = ()
    is_program: bool = True
    kinds: tuple[str, ...] = ("KIND_GPU", "KIND_CPU", "KIND_MODEL")
    parameters: Settings = field(default_factory=dict)


_threads, _switch = Integer(0, _THREADS), Switch()
_true, _yes = Switch("true", "false"), Switch("YES", "NO")
_bytes = Integer(0, _UINT64)
_streams = Either(Choice(("AUTO", "NUMA")), _threads)

# onnxruntime.cc: `TryParseModelStringParameter` is `stoi`, which throws past it; `ParseBoolValue` knows no yes and no;
# what goes on to ONNX Runtime as text is read there without throwing, switches as 0 or 1.
_ONNXRUNTIME: Settings = {
    "intra_op_thread_count": _threads,  # stoi
    "inter_op_thread_count": _threads,  # stoi
    "execution_mode": Integer(0, 1),  # stoi
    "level": Integer(-1, 99),  # not read
    "enable_mem_arena": _switch,  # ParseBoolValue
    "enable_mem_pattern": _switch,  # ParseBoolValue
    # Read at each request by ONNX Runtime (`ValidateAndParseShrinkArenaString`): devices like cpu:0.
    "memory.enable_memory_arena_shrinkage": ListOf(
        "(cpu|gpu):(0|[1-9][0-9]?)", 8, "devices like 'cpu:0;gpu:0'"
    ),
    "arena_extend_strategy": Choice(("0", "1"), {"kNextPowerOfTwo": "0", "kSameAsRequested": "1"}),  # stoi
    "gpu_mem_limit": _bytes,  # ONNX Runtime's size_t
    "cudnn_conv_algo_search": Choice(
        ("0", "1", "2"), {"EXHAUSTIVE": "0", "HEURISTIC": "1", "DEFAULT": "2"}
    ),  # stoi
    "cudnn_conv_use_max_workspace": _switch,  # not read
    "cudnn_conv1d_pad_to_nc1d": _switch,  # not read
    "do_copy_in_default_stream": _switch,  # ONNX Runtime's bool
    "use_tf32": _switch,  # not read
    "session.use_device_allocator_for_initializers": _switch,  # on where it is "1"
    "session.disable_prepacking": _switch,  # not read
    "session.intra_op.allow_spinning": _switch,  # not read
    "session.inter_op.allow_spinning": _switch,  # not read
}
# openvino.cc: digits only (`IsNumber`), then `stoi`, which nothing catches; a switch is on where it says yes.
_OPENVINO: Settings = {
    "CPU_THREADS_NUM": _threads,  # not read any more
    "INFERENCE_NUM_THREADS": _threads,  # IsNumber, stoi
    "COMPILATION_NUM_THREADS": _threads,  # IsNumber, stoi
    "CPU_THROUGHPUT_STREAMS": Either(
        Choice(("CPU_THROUGHPUT_AUTO", "CPU_THROUGHPUT_NUMA")), _streams
    ),  # not read any more
    "NUM_STREAMS": _streams,  # a word, or IsNumber and stoi
    "HINT_BF16": Switch("YES", None),  # another word fails the load
    "ENFORCE_BF16": _yes,  # not read any more
    "PERFORMANCE_HINT": Choice(("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")),
    "ENABLE_BATCH_PADDING": _yes,
    "SKIP_OV_DYNAMIC_BATCHSIZE": _yes,
    "RESHAPE_IO_LAYERS": _yes,
}
# shared_state.h, by rapids-triton's `get_config_param`: `istringstream >> T`, "true" or "false" for a bool.
_FIL: Settings = {
    "model_type": Choice(("xgboost", "xgboost_json", "xgboost_ubj", "lightgbm", "treelite_checkpoint")),
    "predict_proba": _true,
    "output_class": _true,
    "is_classifier": _true,
    "threshold": Real(1e38),  # >> float
    "algo": Choice(("ALGO_AUTO", "NAIVE", "TREE_REORG", "BATCH_TREE_REORG")),
    "storage_type": Choice(("AUTO", "DENSE", "SPARSE", "SPARSE8")),
    "blocks_per_sm": Integer(0, 4096),  # >> int
    "threads_per_tree": Integer(1, 4096),  # >> int
    "chunk_size": Integer(1, 2**16),  # >> int
    "transfer_threshold": Integer(0, 2**63 - 1),  # >> size_t
    "use_experimental_optimizations": _true,
    "xgboost_allow_unknown_field": _true,
}
# model_state.cc compares it with these two words.
_TENSORRT: Settings = {
    "execution_context_allocation_strategy": Choice(("STATIC", "ON_PROFILE_CHANGE")),
}
# python_be.cc compares it with these two words. What else there is the model's code reads.
_PYTHON: Settings = {"FORCE_CPU_ONLY_INPUT_TENSORS": Switch("yes", "no")}
# libtorch.cc and pt/model_state.cc: `ParseBoolValue`, and `ParseIntValue`, which is `stoi`.
_PYTORCH: Settings = {
    "INTRA_OP_THREAD_COUNT": Integer(-1, _THREADS),
    "INTER_OP_THREAD_COUNT": Integer(-1, _THREADS),
    **dict.fromkeys(
        (
            "DISABLE_OPTIMIZED_EXECUTION",
            "ENABLE_CACHE_CLEANING",
            "INFERENCE_MODE",
            "DISABLE_CUDNN",
            "ENABLE_TENSOR_FUSER",
            "ENABLE_WEIGHT_SHARING",
            "ENABLE_JIT_PROFILING",
            "ENABLE_JIT_EXECUTOR",
        ),
        _true,
    ),
}
# tensorflow.cc: `ParseIntValue`, which is `stoi`, and `ParseBoolValue`.
_TENSORFLOW: Settings = {
    "MAX_SESSION_SHARE_COUNT": Integer(1, 1024),
    "TF_NUM_INTRA_THREADS": _threads,
    "TF_NUM_INTER_THREADS": _threads,
    "TF_USE_PER_SESSION_THREADS": _true,
}
# parameters.h: `from_string<int>`, which is `stoi`.
_DALI: Settings = {"num_threads": Integer(-1, _THREADS)}

BACKENDS: Mapping[str, Backend] = {
    "python": Backend(files=(("model.py",),), parameters=_PYTHON),
    "onnxruntime": Backend(
        files=(("model.onnx",),), is_program=False, kinds=("KIND_GPU", "KIND_CPU"), parameters=_ONNXRUNTIME
    ),
    # Triton takes plans that carry code only with --backend-config=tensorrt,version-compatible=true.
    "tensorrt": Backend(
        files=(("model.plan",),),
        is_program=False,
        kinds=("KIND_GPU",),
        parameters=_TENSORRT,
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
    "pytorch": Backend(files=(("model.pt",), ("model.pt2",), ("model.py",)), parameters=_PYTORCH),
    "tensorflow": Backend(files=(("model.savedmodel",), ("model.graphdef",)), parameters=_TENSORFLOW),
    "dali": Backend(files=(("model.dali",), ("dali.py",)), kinds=("KIND_GPU", "KIND_CPU"), parameters=_DALI),
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
# Without a backend in config.pbtxt the file determines it, as in Triton, where only one backend has such a file.
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
#
# onnxruntime.cc (tensorrt, cuda, openvino) and tensorflow.cc (tensorrt and the last two): `ParseIntValue` is
# `stoi`, `ParseUnsignedLongLongValue` `stoull`, `ParseLongLongValue` `stoll`; all three throw past it. ONNX Runtime
# reads the same text once more, without throwing, switches as 0 or 1.
ACCELERATORS: Mapping[str, Settings] = {
    "tensorrt": {
        "precision_mode": Choice(("FP32", "FP16", "BF16", "INT8")),
        "max_workspace_size_bytes": Integer(0, 2**63 - 1),  # stoull, stoll
        "max_partition_iterations": Integer(1, 10_000),  # not read
        "trt_max_partition_iterations": Integer(1, 10_000),  # stoi
        "minimum_segment_size": Integer(1, 10_000),  # stoll
        "trt_min_subgraph_size": Integer(1, 10_000),  # stoi
        "max_cached_engines": Integer(1, 1000),  # stoll
        "trt_layer_norm_fp32_fallback": _switch,
        "trt_build_heuristics_enable": _switch,
        "trt_builder_optimization_level": Integer(0, 5),  # stoi
        "trt_cuda_graph_enable": _switch,
    },
    # ONNX Runtime's own readers alone.
    "cuda": {
        "cudnn_conv_algo_search": Choice(
            ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
        ),
        "cudnn_conv_use_max_workspace": _switch,
        "use_tf32": _switch,
        "prefer_nhwc": _switch,
    },
    "openvino": {"num_of_threads": _threads},  # not read
    "auto_mixed_precision": {},
    "gpu_io": {},
}
