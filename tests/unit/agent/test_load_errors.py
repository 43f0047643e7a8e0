import pytest

from agent.load_errors import classify, explain
from berth.contract.report import Failure

# As Triton 2.51 answers a load, except for the first group: those are what its backends pass on.
TEXTS = [
    ("CUDA error: out of memory", Failure.CAPACITY),
    ("onnx runtime error 6: Failed to allocate memory for requested buffer of size 9", Failure.CAPACITY),
    (
        "failed to allocate CUDA memory with byte size 9 on GPU 0: CNMEM_STATUS_OUT_OF_MEMORY",
        Failure.CAPACITY,
    ),
    ("memory limit set for GPU 0 has exceeded", Failure.CAPACITY),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", Failure.CAPACITY),
    ("[TRT] Requested amount of GPU memory (9 bytes) could not be allocated", Failure.CAPACITY),
    (
        "onnx runtime error 7: Load model from 1/model.onnx failed: Protobuf parsing failed.",
        Failure.INVALID_MODEL,
    ),
    ("unable to find '/models/m/1/model.onnx' for model instance 'm'", Failure.INVALID_MODEL),
    ("Failed to create shared memory region", Failure.TRANSIENT),
    ("CUDA driver version is insufficient for CUDA runtime version", Failure.TRANSIENT),
    ("ImportError: libcudnn.so.9: cannot open shared object file: No such file", Failure.TRANSIENT),
    ("unable to create stream: something else", Failure.TRANSIENT),
    ("failed to allocate pinned system memory", Failure.TRANSIENT),
    ("something that nobody has seen before", Failure.TRANSIENT),
    ("", Failure.TRANSIENT),
    ("failed to load 'm', failed to poll from model repository", Failure.TRANSIENT),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ModuleNotFoundError: "
        "No module named 'torch9'\n\nAt:\n  /models/m/1/model.py(4): initialize\n;\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: SyntaxError: "
        "invalid syntax (model.py, line 1);\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: AttributeError: "
        "module '1.model' has no attribute 'TritonPythonModel';\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ConnectionRefusedError: "
        "[Errno 111] Connection refused\n\nAt:\n  /models/m/1/model.py(4): initialize\n;\n",
        Failure.TRANSIENT,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: RuntimeError: "
        "no weights here\n\nAt:\n  /models/m/1/model.py(4): initialize\n;\n",
        Failure.TRANSIENT,  # what it was, only its author knows
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: Stub process "
        "'m_0_0' is not healthy.;\n",
        Failure.TRANSIENT,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: unable to find "
        "backend library for backend 'tensorflow9', try specifying runtime on the model configuration.;\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: model input 'I' "
        "dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m;\n",
        Failure.INVALID_MODEL,
    ),
    (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: instance group m_0 "
        "of model m specifies invalid or unsupported gpu id 3. GPUs with at least the minimum required CUDA "
        "compute compatibility of 6.000000 are: ;\n",
        Failure.TRANSIENT,
    ),
    (
        "load failed for model 'm': at least one version must be available under the version policy of "
        "model 'm'\n",
        Failure.INVALID_MODEL,
    ),
]


@pytest.mark.parametrize(("reason", "kind"), TEXTS)
def test_failures_are_distinguished_by_tritons_text(reason: str, kind: Failure) -> None:
    assert classify(reason) is kind


def test_a_text_without_the_cause_says_where_it_is() -> None:
    assert "Triton's log" in explain("failed to load 'm', failed to poll from model repository")
    assert explain("CUDA error: out of memory") == "CUDA error: out of memory"
