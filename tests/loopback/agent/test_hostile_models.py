"""Models whose files want more than to be served, on a real Triton: it lives, a neighbour serves, and the
reason says what would be right. Under the rule that takes any code, so that nothing else holds them."""

import re
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from agent.admission import CONFIG_FILE
from berth.contract.report import CodeRule, Failure, ModelState
from localcluster import triton
from tests.fakes.agent_node import Node, on_server
from tests.loopback.agent.served import CONFIG, Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

VICTIM = """
import numpy, triton_python_backend_utils as utils
class TritonPythonModel:
    def initialize(self, args):
        open({marker!r}, "a").write(args["model_name"] + "\\n")
    def execute(self, requests):
        return [utils.InferenceResponse([utils.Tensor("O", numpy.array([42], numpy.int32))]) for _ in requests]
"""
HARMLESS = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
SEQUENCES = """
sequence_batching { %s state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ %s ]
  initial_state { name: "z" data_type: TYPE_FP32 dims: [ %s ] %s } } ] }
"""
WARMUP = (
    'model_warmup [ { name: "w" batch_size: %s inputs { key: "I" value { data_type: TYPE_INT32 %s } } } ]'
)
BUCKETS = """model_metrics { metric_control [ { metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 3, 1, 2 ] } } ] }"""
# A library that tells that it was opened, in the file named instead of MARKER.
NATIVE = """#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void opened(void) {{
  int file = open("{marker}", O_CREAT | O_WRONLY | O_APPEND, 0600);
  if (file >= 0) {{ write(file, "native\\n", 7); close(file); }}
}}
"""


@dataclass(frozen=True)
class Hostile:
    """What stands in config.pbtxt beside the ordinary, what other files there are, and what is told."""

    said: str
    more: str = ""
    backend: str = "python"
    files: Mapping[str, str | bytes] = field(default_factory=lambda: {"1/model.py": HARMLESS})

    def all_files(self, native: bytes) -> dict[str, str | bytes]:
        config = CONFIG.replace("python", self.backend) + self.more
        files = {path: native if body == b"NATIVE" else body for path, body in self.files.items()}
        return {CONFIG_FILE: config, **files}


HOSTILE = {
    "its own backend": Hostile(
        "backend: 'evil' is not among what this node's Triton has: python",
        backend="evil",
        files={"libtriton_evil.so": b"NATIVE", "1/model.py": HARMLESS},
    ),
    "a library as runtime": Hostile(
        "runtime: 'libx.so'; leave it out",
        'runtime: "libx.so"',
        files={"libx.so": b"NATIVE", "1/model.py": HARMLESS},
    ),
    "a neighbour's program": Hostile(
        "default_model_filename: '../../model-victim/1/model.py' does not stay inside",
        'default_model_filename: "../../model-victim/1/model.py"',
    ),
    "an absolute program": Hostile(
        "default_model_filename: '/etc/passwd' does not stay inside",
        'default_model_filename: "/etc/passwd"',
    ),
    "a program for a shell": Hostile(
        "default_model_filename: 'model.py;id' does not stay inside",
        'default_model_filename: "model.py;id"',
        files={"1/model.py;id": HARMLESS},
    ),
    "a neighbour's program for one GPU": Hostile(
        "cc_model_filenames.*does not stay inside",
        'cc_model_filenames { key: "8.6" value: "../../model-victim/1/model.py" }',
    ),
    "no program": Hostile("backend 'python': 1/model.py is needed, and not there", files={"1/x": "x"}),
    "no version": Hostile("there is no version directory", files={"model.py": HARMLESS}),
    "a version beyond numbers": Hostile(
        "directory '99999999999999999999' is no version",
        files={"1/model.py": HARMLESS, "99999999999999999999/model.py": HARMLESS},
    ),
    "fifty thousand versions": Hostile(
        "versions: 50000 entries; at most 32 are taken",
        f"version_policy {{ specific {{ versions: [ {', '.join('1' for _ in range(50_000))} ] }} }}",
    ),
    "a warm-up of 2^58": Hostile(
        r"dims\[0\]: 288230376151711744; 1 to 2147483648 is taken",
        WARMUP % (1, "dims: [ 288230376151711744 ] random_data: true"),
    ),
    "a warm-up of many": Hostile(
        r"model_warmup: \d+ bytes; at most 536870912 are taken",
        WARMUP % (4096, "dims: [ 2147483648 ] zero_data: true"),
    ),
    "a warm-up with a neighbour's file": Hostile(
        "input_data_file: '../../model-victim/1/model.py' does not stay inside",
        WARMUP % (1, 'dims: [ 1 ] input_data_file: "../../model-victim/1/model.py"'),
        files={"1/model.py": HARMLESS, "warmup/x": "x"},
    ),
    "a state of a neighbour's file": Hostile(
        "data_file: '../../model-victim/1/model.py' does not stay inside",
        SEQUENCES % ("direct { }", 1, 1, 'data_file: "../../model-victim/1/model.py"'),
        files={"1/model.py": HARMLESS, "initial_state/x": "x"},
    ),
    "a state of 2^58": Hostile(
        r"dims\[0\]: 288230376151711744; -1 or 1 to 2147483648 is taken",
        SEQUENCES % ("direct { }", 2**58, 2**58, "zero_data: true"),
    ),
    "sequences without end": Hostile(
        "max_candidate_sequences: 2147483647; 0 to 4096 is taken",
        SEQUENCES % ("oldest { max_candidate_sequences: 2147483647 }", 1, 1, "zero_data: true"),
    ),
    "an interpreter of elsewhere": Hostile(
        "EXECUTION_ENV_PATH.*; .*TRITON_MODEL_DIRECTORY/FILE is taken",
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/tmp/env.tar.gz" } }',
    ),
    "an interpreter of a neighbour": Hostile(
        "EXECUTION_ENV_PATH.*does not stay inside",
        'parameters { key: "EXECUTION_ENV_PATH" '
        'value { string_value: "$$TRITON_MODEL_DIRECTORY/../model-victim/env.tar.gz" } }',
    ),
    "labels of a neighbour": Hostile(
        "label_filename: '../model-victim/config.pbtxt' does not stay inside",
        'output [ { name: "P" data_type: TYPE_INT32 dims: [ 1 ] '
        'label_filename: "../model-victim/config.pbtxt" } ]',
    ),
    "operators of its own": Hostile(
        "op_library_filename: leave it out|op_library_filename.0.: leave it out",
        'model_operations { op_library_filename: "libx.so" }',
        files={"libx.so": b"NATIVE", "1/model.py": HARMLESS},
    ),
    "buckets that fall": Hostile("buckets must ascend", BUCKETS),
    "a tag that is none": Hostile(
        "metric_tags.*a letter or digit, .* is taken", 'metric_tags { key: "a b-c" value: "x" }'
    ),
    "a tag that Prometheus keeps for itself": Hostile(
        "metric_tags.*a letter or digit, .* is taken", 'metric_tags { key: "_x" value: "x" }'
    ),
    "a billion instances": Hostile(
        r"instance_group\[0\].count: 1000000000; 0 to 64 is taken", "instance_group [ { count: 1000000000 } ]"
    ),
    "other models": Hostile(
        "ensemble_scheduling: leave it out: a pod is one model",
        'ensemble_scheduling { step [ { model_name: "model-victim" model_version: 1 } ] }',
    ),
    "a stub of its own": Hostile(
        "triton_python_backend_stub: leave it out",
        files={"1/model.py": HARMLESS, "triton_python_backend_stub": "#!/bin/sh\n"},
    ),
    "a repository agent": Hostile(
        "model_repository_agents: leave it out",
        'model_repository_agents { agents [ { name: "x" } ] }',
    ),
}


@dataclass
class Neighbours:
    """A Triton with a victim that serves, and a library that tells when it is opened."""

    served: Served
    node: Node
    native: bytes
    marker: Path

    async def answer(self) -> int:
        address = f"{self.served.address}:{triton.GRPC_PORT}"
        async with InferenceServerClient(address) as client:
            asked = InferInput("I", [1], "INT32")
            asked.set_data_from_numpy(np.zeros(1, np.int32))
            headers = self.served.keys.inference_grpc_metadata
            result = await client.infer(on_server("victim"), [asked], headers=headers, client_timeout=20)
        return int(result.as_numpy("O")[0])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbours(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Neighbours]:
    directory = tmp_path_factory.mktemp("hostile")
    marker, source = directory / "marker", directory / "native.c"
    source.write_text(NATIVE.format(marker=marker))
    library = directory / "native.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    async with serving(directory / "node") as served:
        node = served.node(code=CodeRule.ANY)
        files = {CONFIG_FILE: CONFIG, "1/model.py": VICTIM.format(marker=str(marker))}
        victim = await node.stage("victim", files=files)
        await node.lifecycle.start_load(victim)
        assert victim.state is ModelState.READY, victim.reason
        yield Neighbours(served, node, library.read_bytes(), marker)


@pytest.mark.parametrize("kind", sorted(HOSTILE))
async def test_a_hostile_model_is_refused_and_its_neighbour_serves(neighbours: Neighbours, kind: str) -> None:
    node, hostile = neighbours.node, HOSTILE[kind]
    uid = f"h{sorted(HOSTILE).index(kind)}"
    model = await node.stage(uid, files=hostile.all_files(neighbours.native), namespace="other")
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.INVALID_MODEL), model.reason
    assert re.search(hostile.said, model.reason), model.reason
    assert (
        neighbours.marker.read_text() == f"{on_server('victim')}\n"
    )  # nobody else has run it, or native code
    assert await neighbours.answer() == 42


async def test_what_is_fine_is_loaded_as_it_says(neighbours: Neighbours) -> None:
    """As many of the fields as the python backend takes: Triton has them all, written anew."""
    node = neighbours.node
    config = """
    backend: "python" max_batch_size: 8 default_model_filename: "main.py"
    input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] label_filename: "labels.txt" } ]
    instance_group [ { count: 1 kind: KIND_CPU }, { count: 2 gpus: [ 7 ] } ]
    dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 priority_levels: 2
      default_priority_level: 1 priority_queue_policy { key: 2 value { max_queue_size: 3 } } }
    version_policy { all { } } metric_tags { key: "team" value: "a" }
    model_warmup [ { name: "w" batch_size: 1 inputs { key: "I" value {
      data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "one" } } } ]
    parameters { key: "free" value { string_value: "/any/where" } }
    model_transaction_policy { decoupled: false } response_cache { enable: false }
    """
    program = VICTIM.format(marker="/dev/null")
    files = {CONFIG_FILE: config, "1/main.py": program, "3/main.py": program}
    model = await node.stage("fine", files={**files, "warmup/one": b"\1\0\0\0", "labels.txt": "a\n"})
    await node.lifecycle.start_load(model)
    assert model.state is ModelState.READY, model.reason
    address = f"{neighbours.served.address}:{triton.GRPC_PORT}"
    async with InferenceServerClient(address) as client:
        headers = neighbours.served.keys.inference_grpc_metadata
        told = (await client.get_model_config(on_server("fine"), headers=headers, client_timeout=30)).config
    assert [(group.count, group.kind) for group in told.instance_group] == [(1, 2), (2, 2)]
    assert told.dynamic_batching.priority_queue_policy[2].max_queue_size == 3
    assert told.parameters["free"].string_value == "/any/where"
    assert told.metric_tags["team"] == "a"
