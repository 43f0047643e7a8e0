import json
from typing import Any

import pytest

from proxy.json_guard import BadJson, check_generate, check_infer


def body(**changes: Any) -> bytes:
    tensor = {"name": "I", "shape": [2], "datatype": "INT32", "data": [1, 2], **changes.pop("tensor", {})}
    return json.dumps({"inputs": [tensor], **changes}).encode()


def test_an_ordinary_request_passes() -> None:
    check_infer(body(outputs=[{"name": "O", "parameters": {"binary_data": True}}], id="1"), binary_bytes=None)
    check_infer(body(tensor={"data": [[[1], [2]]] * 10, "shape": [10, 2, 1]}), binary_bytes=None)
    check_infer(body(tensor={"shape": [1000, 1000]}), binary_bytes=4_000_000)
    check_infer(body(tensor={"shape": [0, 10**12], "data": []}), binary_bytes=None)
    check_generate(b'{"text_input": "' + b"[" * 5000 + b'"}')  # brackets in a string are text


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (b"[" * 200_000, "nested deeper"),
        (b'{"x":' * 200_000, "nested deeper"),
        (b'{"unknown":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested deeper"),
        (b'{"a":"\\"","b":' + b"[" * 101 + b"]" * 101 + b"}", "nested deeper"),
        (body(tensor={"shape": [10_000_000_000]}), "declares more elements"),
        (body(tensor={"shape": [10**6, 10**6, 10**6]}), "declares more elements"),
        (body(tensor={"shape": [-1]}), "something other than sizes"),
        (body(tensor={"shape": [True]}), "something other than sizes"),
        (body(tensor={"shape": [1.5]}), "something other than sizes"),
        (body(tensor={"shape": "2"}), "must be a list"),
        (body(tensor={"shape": [1] * 65}), "at most 64"),
        (
            body(tensor={"parameters": {"shared_memory_region": "r"}}),
            r"inputs\[0\].parameters: shared memory",
        ),
        (
            body(outputs=[{"name": "O", "parameters": {"shared_memory_offset": 1}}]),
            r"outputs\[0\].parameters",
        ),
        (body(tensor={"parameters": []}), "must be an object"),
        (body(inputs={}), "inputs must be a list"),
        (body(inputs=[1]), "inputs must be a list"),
        (body(outputs="all"), "outputs must be a list"),
        (b'{"inputs":[],"inputs":[{"shape":[10000000000]}]}', "one key twice"),
        (b'{"inputs":[{"shape":[1],"shape":[10000000000]}]}', "one key twice"),
        (b"", "not JSON"),
        (b"[]", "object is expected"),
        (b"\xff", "not JSON"),
        ('{"inputs":[]}'.encode("utf-16"), "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "nested deeper"),
        (b'{"a":' + b'{"b":' * 150 + b"1" + b"}" * 150 + b"}", "nested deeper"),
        (b'{"inputs":[]}x', "not JSON"),
    ],
)
def test_what_triton_would_die_of_or_obey_is_refused(request_body: bytes, message: str) -> None:
    with pytest.raises(BadJson, match=message):
        check_infer(request_body, binary_bytes=None)


def test_a_generate_request_may_not_point_into_shared_memory() -> None:
    with pytest.raises(BadJson):
        check_generate(b'{"parameters":{"shared_memory_region":"r"}}')
