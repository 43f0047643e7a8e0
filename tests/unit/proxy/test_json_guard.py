import json
from typing import Any

import pytest

from proxy.json_guard import BadJson, check_generate, check_infer
from proxy.model_facts import ModelFacts

FACTS = ModelFacts(fixed_outputs=frozenset({"FIXED"}))


def body(**changes: Any) -> bytes:
    tensor = {"name": "I", "shape": [2], "datatype": "INT32", "data": [1, 2], **changes.pop("tensor", {})}
    return json.dumps({"inputs": [tensor], **changes}).encode()


def test_an_ordinary_request_passes() -> None:
    check_infer(body(outputs=[{"name": "O", "parameters": {"binary_data": True}}], id="1"), FACTS)
    check_infer(body(tensor={"data": [[[1], [2]]] * 10, "shape": [10, 2, 1]}), FACTS)
    check_infer(body(tensor={"shape": [1000, 1000]}), FACTS, binary_bytes=4_000_000)
    check_infer(body(tensor={"shape": [0], "data": []}), FACTS)
    check_infer(body(tensor={"data": [[[1.5, "a"]], [True]]}), FACTS)
    check_infer(
        b'{"inputs":[{"name":"Infinity","shape":[2],"datatype":"FP32","data":[NaN,-Infinity]}]}', FACTS
    )
    check_infer(body(outputs=[{"name": "FIXED", "parameters": {"classification": 2}}]), FACTS)
    check_infer(body(id="\u00fc", unknown=None), FACTS)
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
        (body(tensor={"shape": [-1]}), r"inputs\[0\].shape|Expected `int`"),
        (body(tensor={"shape": [True]}), r"inputs\[0\].shape|Expected `int`"),
        (body(tensor={"shape": [1.5]}), r"inputs\[0\].shape|Expected `int`"),
        (body(tensor={"shape": "2"}), "Expected `array`, got `str`"),
        (body(tensor={"shape": [1] * 65}), "length <= 64"),
        (
            body(tensor={"parameters": {"shared_memory_region": "r"}}),
            r"inputs\[0\].parameters: shared memory",
        ),
        (
            body(outputs=[{"name": "O", "parameters": {"shared_memory_offset": 1}}]),
            r"outputs\[0\].parameters",
        ),
        (body(tensor={"parameters": []}), "Expected `object`"),
        (body(inputs={}), "Expected `array`"),
        (body(inputs=[1]), r"Expected `object`, got `int` - at `.\.inputs\[0\]`"),
        (body(outputs="all"), "Expected `array`"),
        (b'{"inputs":[{"name":"I","datatype":"X","shape":[10000000000]}],"inputs":[]}', "one key twice"),
        (
            b'{"inputs":[{"name":"I","datatype":"X","shape":[10000000000],"shape":[1]}]}',
            "one key twice",
        ),
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"\xff", "malformed"),
        ('{"inputs":[]}'.encode("utf-16"), "malformed"),
        (b"\xef\xbb\xbf{}", "malformed"),
        (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "nested deeper"),
        (b'{"a":' + b'{"b":' * 150 + b"1" + b"}" * 150 + b"}", "nested deeper"),
        (b'{"inputs":[]}x', "trailing"),
        (b'{"inputs":[{"name":"I","datatype":"X","shape":[1],"data":{"a":1},"data":[1]}]}', "one key twice"),
        (b'{"inputs":[{"name":"I","datatype":"X","shape":[1],"data":5,"data":[1]}]}', "one key twice"),
        (b'{"inputs":[],"a\xff":1}', "utf-8"),
        (b'{"inputs":[null]}', "Expected `object`, got `null`"),
        (body(outputs=[{"name": 1}]), "Expected `str`"),
        (body(id={}), "Expected `str`"),
        (body(parameters={"sequence_id": [[]]}), "got `array`"),
        (body(tensor={"data": {"a": 1}}), r"inputs\[0\].data must be an array"),
        (body(tensor={"data": [1, {"a": 1}]}), "must hold numbers"),
        (body(tensor={"data": [1, None]}), "must hold numbers"),
        (body(outputs=[{"name": "LOOSE", "parameters": {"classification": 2}}]), "classification"),
        (
            body(
                tensor={"shape": [0], "data": []},
                outputs=[{"name": "FIXED", "parameters": {"classification": 1}}],
            ),
            "classification",
        ),
        (
            b'{"inputs":[],"outputs":[{"name":"L","parameters":{"classification":2},"parameters":{}}]}',
            "one key twice",
        ),
        (
            b'{"inputs":[],"outputs":[{"name":"L","parameters":{"classific\\u0061tion":2}}]}',
            "classification",
        ),
        (
            b'{"inputs":[{"name":"I","datatype":"X","shape":[1],"parameters":{"sh\\u0061red_memory_region":"r"}}]}',
            "shared memory",
        ),
    ],
)
def test_what_triton_would_die_of_or_obey_is_refused(request_body: bytes, message: str) -> None:
    with pytest.raises(BadJson, match=message):
        check_infer(request_body, FACTS)


@pytest.mark.parametrize(
    "request_body",
    [
        b'{"a":{"b":1},"a":1}',
        b"[1]",
        b'{"text":{"a":1}}',
        b'{"text":null}',
        b'{"x":[{}]}',
        b'{"parameters":{"a":[1]}}',
    ],
)
def test_a_generate_request_is_flat(request_body: bytes) -> None:
    check_generate(b'{"text_input":"hi","stream":false,"parameters":{"temperature":0.5},"ids":[[1,2],[3]]}')
    with pytest.raises(BadJson):
        check_generate(request_body)


def test_a_generate_request_may_not_point_into_shared_memory() -> None:
    with pytest.raises(BadJson):
        check_generate(b'{"parameters":{"shared_memory_region":"r"}}')
