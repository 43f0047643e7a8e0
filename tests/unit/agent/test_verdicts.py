"""What is refused names its field and says what would be right."""

import pytest

from agent.admission import (
    InvalidModel,
)
from tests.fakes.admission import ONNX_CONFIG, judged

DIMS = 'input [ { name: "I" data_type: TYPE_FP32 dims: [ %s ] } ]'


QUEUE = "dynamic_batching { %s }"


PARAMETER = 'parameters { key: "%s" value { string_value: "%s" } }'


WARM = 'model_warmup [ { name: "w" batch_size: %d inputs { key: "I" value { data_type: TYPE_FP32 %s } } } ]'


METRIC = 'model_metrics { metric_control [ { metric_identifier { family: "%s" } %s } ] }'


ACCELERATOR = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "%s" %s } ] } }'


FIRST = """sequence_batching { direct { } state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ]
  initial_state { name: "z" data_type: TYPE_FP32 %s } } ] }"""


REFUSED = [
    (FIRST % "dims: [ 67108864 ] zero_data: true", None),
    (FIRST % "dims: [ 67108865 ] zero_data: true", "state: 268435460 bytes at first; at most 268435456"),
    (
        FIRST % "dims: [ 67108864 ] zero_data: true" + "instance_group { count: 2 }",
        "state: 536870912 bytes at first",
    ),
    (FIRST % 'dims: [ 1 ] data_file: "x"', "data_file: there is no file 'initial_state/x'"),
    (FIRST.replace('"z" data_type: TYPE_FP32', '"z"') % "dims: [ 1 ]", "initial_state: a data_type like"),
    ('sequence_batching { state { input_name: "S" } state { input_name: "S" } }', "state: 'S' comes twice"),
    ("max_batch_size: many", r"config.pbtxt: 1:\d+"),
    ("nonsense { }", "no field named"),
    ("input {" * 2000, "no field named"),
    ('platform: "ensemble"', "ensembles are not served"),
    ("ensemble_scheduling { }", "ensemble_scheduling: leave it out: a pod is one model"),
    ("model_repository_agents { }", "model_repository_agents: leave it out"),
    ("instance_group [ { count: 65 } ]", r"instance_group\[0\].count: 65; 0 to 64 is taken"),
    (
        "instance_group [ { count: 40 }, { count: 25 } ]",
        "instance_group: 65 instances of 1 versions; at most 64",
    ),
    ("instance_group [ { count: -1 } ]", "count: -1; 0 to 64"),
    ('instance_group [ { name: "a" }, { name: "a" } ]', "two groups have one name"),
    ("instance_group [ { passive: true } ]", "all are passive"),
    ("instance_group [ { secondary_devices [ { device_id: 1 } ] } ]", "secondary_devices: only|only GPUs"),
    (
        "instance_group [ { kind: KIND_MODEL } ]",
        "kind: KIND_MODEL; this backend runs on KIND_GPU or KIND_CPU",
    ),
    ('instance_group [ { profile: "-1" } ]', "'-1'; a whole number from 0 to 9999 is taken"),
    ("instance_group [ { rate_limiter { resources [ { count: 4000000000 } ] } } ]", "0 to 1024 is taken"),
    ('platform: "caffe2_netdef"', "platform: 'caffe2_netdef' is none of"),
    ('backend: "python" platform: "tensorrt_plan"', "does not go with platform"),
    ('backend: "tensorflow"', "backend: 'tensorflow' is not among what this node's Triton has: dali"),
    ('backend: "../evil"', "a name like 'python' is taken"),
    ('backend: "python\\000x"', "unprintable|a name like"),
    ('runtime: "libtriton_python.so"', "runtime: .*leave it out"),
    ("max_batch_size: -4", "max_batch_size: -4; 0 to 65536 is taken"),
    ("max_batch_size: 2147483647", "max_batch_size: 2147483647; 0 to 65536"),
    ("max_batch_size: 2147483648", "config.pbtxt: 1:"),
    (DIMS % "0", r"input\[0\].dims\[0\]: 0; -1 or 1 to 2147483648 is taken"),
    (DIMS % "-7", r"dims\[0\]: -7"),
    (DIMS % "65536, 65536", r"dims: 4294967296 elements; at most 2147483648"),
    (DIMS % ", ".join("1" * 17), "dims: 17 entries; at most 16"),
    (DIMS % "1" + DIMS % "1", "input: 'I' comes twice"),
    (DIMS.replace('"I"', '""') % "1", r"input\[0\]: it has no name"),
    (WARM.replace("TYPE_FP32", "TYPE_INVALID") % (1, "dims: [ 1 ] zero_data: true"), "a data_type like"),
    (DIMS.replace("TYPE_FP32", "99") % "1", "data_type: 99 is none of|config.pbtxt: 1:"),
    (DIMS.replace('"I"', '"\\001"') % "1", "unprintable"),
    (DIMS.replace('"I"', f'"{"x" * 1025}"') % "1", "1025 characters; at most 1024"),
    (QUEUE % "max_queue_delay_microseconds: 18446744073709551615", "0 to 60000000 is taken"),
    (QUEUE % "preferred_batch_size: [ 0 ]", "preferred_batch_size.0.: 0; 1 to"),
    ("max_batch_size: 4 " + QUEUE % "preferred_batch_size: 8", "8 is more than max_batch_size 4"),
    (QUEUE % "priority_levels: 1000000000000", "priority_levels: 1000000000000; 0 to 256"),
    (QUEUE % "default_priority_level: 3 priority_levels: 2", "level 3, but priority_levels is 2"),
    (QUEUE % "default_queue_policy { max_queue_size: 4294967295 }", "max_queue_size: 4294967295"),
    ("max_batch_size: 8192 sequence_batching { }", "8192 sequences at once; at most 4096"),
    ("sequence_batching { oldest { max_candidate_sequences: -1 } }", "-1; 0 to 4096"),
    ("version_policy { latest { num_versions: 4294967295 } }", "num_versions: 4294967295; 1 to 32"),
    ("version_policy { specific { versions: [ 7, 8 ] } }", "of versions 7, 8 none is there; there is 1"),
    ("version_policy { specific { versions: [ -1 ] } }", "-1; 0 to"),
    (WARM % (1, "dims: [ 288230376151711744 ] random_data: true"), "288230376151711744; 1 to 2147483648"),
    (WARM % (1, "dims: [ -1 ] zero_data: true"), "dims.0.: -1; 1 to"),
    (WARM % (1, "dims: [ 134217729 ] zero_data: true"), "536870916 bytes; at most 536870912"),
    (WARM % (1, "dims: [ 67108865 ] zero_data: true") + "instance_group { count: 2 }", "536870920 bytes"),
    ("max_batch_size: 64 sequence_batching { direct { } } instance_group { count: 64 }", None),
    ("max_batch_size: 65 sequence_batching { direct { } } instance_group { count: 64 }", "4160 sequences"),
    (WARM % (4096, "dims: [ 65536 ] zero_data: true"), "1073741824 bytes"),
    (WARM % (4097, "dims: [ 1 ] zero_data: true"), "batch_size: 4097; 0 to 4096"),
    (WARM % (1, "dims: [ 1 ]"), "zero_data, random_data or input_data_file is expected"),
    (WARM % (1, 'dims: [ 1 ] input_data_file: "x"'), "there is no file 'warmup/x'"),
    ("model_warmup [ { count: 600 }, { name: 'b' count: 600 } ]", "1200 runs; at most 1000"),
    ('default_model_filename: "../1/model.onnx"', "default_model_filename: .* does not stay inside"),
    ('default_model_filename: "/model.onnx"', "does not stay inside"),
    ('default_model_filename: "a//model.onnx"', "does not stay inside"),
    ('default_model_filename: "./model.onnx"', "does not stay inside"),
    ('default_model_filename: "a\\\\model.onnx"', "does not stay inside"),
    ('default_model_filename: "a\\000b"', "does not stay inside"),
    ('default_model_filename: "$(id)"', "does not stay inside"),
    (f'default_model_filename: "{"x" * 1025}"', "a path of 1025 characters"),
    ('default_model_filename: "other.onnx"', "1/other.onnx is needed, and not there"),
    ('cc_model_filenames { key: "8.6" value: "sm86.plan" }', "1/sm86.plan is needed, and not there"),
    ('cc_model_filenames { key: "../x" value: "model.onnx" }', "a compute capability like '8.6' is taken"),
    ('output [ { name: "O" label_filename: "labels" } ]', "there is no file 'labels'"),
    ('model_operations { op_library_filename: "x.so" }', "op_library_filename: leave it out"),
    (PARAMETER % ("session.load_model_format", "/x"), "session.load_model_format'.: not taken; leave it out"),
    (PARAMETER % ("intra_op_thread_count", "1000000"), "'1000000'; a whole number from 0 to 128 is taken"),
    (PARAMETER % ("intra_op_thread_count", "nan"), "a whole number from"),
    (ACCELERATOR % ("evil", ""), "'evil' is none of auto_mixed_precision"),
    (
        ACCELERATOR % ("tensorrt", 'parameters { key: "trt_engine_cache_path" value: "/x" }'),
        "trt_engine_cache_path'.: not taken",
    ),
    ('metric_tags { key: "a-b" value: "c" }', "'a-b'; a letter or digit, and more of them and '_', is taken"),
    ('metric_tags { key: "_a" value: "c" }', "'_a'; a letter or digit"),
    ('metric_tags { key: "" value: "c" }', "''; a letter or digit"),
    ('metric_tags { key: "a_1" value: "c" }', None),
    (METRIC % ("x", "histogram_options { buckets: [ 1, 1 ] }"), "buckets must ascend"),
    (METRIC % ("x", "histogram_options { buckets: [ inf ] }"), "a finite number is taken"),
    (METRIC % ("a b", "histogram_options { buckets: [ 1 ] }"), "the name of a metric is taken"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_refused_says_which_field_and_what_would_be_right(text: str, message: str | None) -> None:
    own = "backend:" in text or "platform:" in text
    if message is None:
        assert judged(ONNX_CONFIG + text)
        return
    with pytest.raises(InvalidModel, match=message):
        judged(text if own else ONNX_CONFIG + text)
