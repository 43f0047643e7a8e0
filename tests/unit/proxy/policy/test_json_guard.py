import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.policy.json_guard import MAX_MEMBERS, asks_for_ready_only, check_generate, check_infer
from proxy.policy.model_facts import ModelFacts
from proxy.policy.refusal import Refusal

FACTS = ModelFacts(fixed_outputs=frozenset({"FIXED"}))


def body(**changes: Any) -> bytes:
    tensor = {"name": "I", "shape": [2], "datatype": "INT32", "data": [1, 2], **changes.pop("tensor", {})}
    return json.dumps({"inputs": [tensor], **changes}).encode()


def binary(size: object, **changes: Any) -> bytes:
    """A request whose one tensor comes behind its JSON."""
    tensor = {"name": "I", "shape": [2], "datatype": "INT32", "parameters": {"binary_data_size": size}}
    return json.dumps({"inputs": [{**tensor, **changes}]}).encode()


def test_an_ordinary_request_passes() -> None:
    check_infer(body(outputs=[{"name": "O", "parameters": {"binary_data": True}}], id="1"), FACTS)
    check_infer(body(tensor={"data": [[[1], [2]]] * 10, "shape": [10, 2, 1]}), FACTS)
    check_infer(binary(4_000_000, shape=[1000, 1000]), FACTS, binary_bytes=4_000_000)
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
        (b'{"a":"\\"","b":' + b"[" * 301 + b"]" * 301 + b"}", "nested deeper"),
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
        (b'{"a":' + b"[" * 350 + b"]" * 350 + b"}", "nested deeper"),
        (b'{"a":' + b'{"b":' * 350 + b"1" + b"}" * 350 + b"}", "nested deeper"),
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
    with pytest.raises(Refusal, match=message):
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
    with pytest.raises(Refusal):
        check_generate(request_body)


def test_a_generate_request_may_not_point_into_shared_memory() -> None:
    with pytest.raises(Refusal):
        check_generate(b'{"parameters":{"shared_memory_region":"r"}}')


def accepts(check: Callable[[bytes], object], text: bytes) -> bool:
    try:
        check(text)
    except Refusal:
        return False
    return True


def infer(text: bytes) -> bytes:
    return check_infer(text, FACTS)


def nested(depth: int, inner: bytes = b"1") -> bytes:
    return b'{"inputs":[{"name":"I","datatype":"X","shape":[1],"data":%b%b%b}]}' % (
        b"[" * depth,
        inner,
        b"]" * depth,
    )


@pytest.mark.parametrize(
    ("make", "check", "fits"),
    [
        # Deeper than numpy's 64 dimensions, the object, the list and the tensor; and not as deep as Triton's stack.
        (lambda n: nested(64 + n), infer, [0, 1]),
        (lambda n: nested(300 + n), infer, []),
        (lambda n: nested(64 + n, b"1," * 60_000 + b"1"), infer, [0, 1]),
        (lambda n: nested(300 + n, b"1," * 60_000 + b"1"), infer, []),
        (lambda n: body(tensor={"shape": [1] * (64 + n)}), infer, [0]),
        (lambda n: body(tensor={"shape": [1, (1 << 63) - 1 + n]}), infer, []),
        (lambda n: b'{"x":"%b","inputs":[]}' % (b"[" * (200 + n)), infer, [0, 1]),
        (lambda n: b'{"parameters":{%b}}' % members(MAX_MEMBERS - 1 + n), check_generate, [0]),
        (lambda n: b'{"inputs":[],"parameters":{%b}}' % members(MAX_MEMBERS - 2 + n), infer, [0]),
        (lambda n: b'{"x":"%b"}' % (b":" * (MAX_MEMBERS * 2 + n)), check_generate, [0, 1]),
        (lambda n: shape_of(4096 + n), infer, [0]),
        (lambda n: b'{"inputs":[],"parameters":{"a":%d}}' % (2**63 - 1 + n), infer, [0]),
        (lambda n: b'{"inputs":[],"parameters":{"a":%d}}' % (-(2**63) - n), infer, [0]),
    ],
)
def test_the_bounds_are_kept_to_the_last_step(
    make: Callable[[int], bytes], check: Callable[[bytes], object], fits: list[int]
) -> None:
    assert [step for step in (0, 1) if accepts(check, make(step))] == fits


def members(count: int) -> bytes:
    return b",".join(b'"%x":1' % number for number in range(count))


def shape_of(size: int) -> bytes:
    return b'{"inputs":[{"name":"I","datatype":"X","shape":%b}]}' % (b"[1" + b" " * (size - 3) + b"]")


def test_a_shape_declares_no_more_than_its_data_can_hold() -> None:
    """A digit and a comma for each element, however much else there is; a 0 hides nothing."""
    for count in (1, 2, 1000):
        data = b"[" + b",".join([b"1"] * count) + b"]"
        for more, taken in ((0, True), (1, True), (2, False)):
            text = b'{"inputs":[{"name":"I","datatype":"INT64","shape":[%d],"data":%b}],"id":"%b"}' % (
                count + more,
                data,
                b"x" * 5000,
            )
            assert accepts(lambda one: check_infer(one, FACTS), text) is taken
    for shape in ([0], [1], [0, 1]):
        text = body(tensor={"shape": [*shape, 1111]}).replace(b' "data": [1, 2]', b' "z": 1')
        for size, taken in ((len(text), True), (len(text) + 1, False)):
            exact = text.replace(b"1111", b"%4d" % size)
            assert len(exact) == len(text)
            assert accepts(lambda one: check_infer(one, FACTS), exact) is taken


@pytest.mark.parametrize(
    ("text", "behind", "taken"),
    [
        (binary(8), 8, True),
        (binary(8), 9, False),  # junk that no tensor owns
        (binary(8), 0, False),
        (binary(9), 9, False),  # more than the shape needs
        (binary(4), 4, False),
        (binary(0, shape=[0, 10]), 0, True),
        (binary(7, datatype="BYTES"), 7, False),  # two lengths do not fit
        (binary(8, datatype="BYTES"), 8, True),
        (binary(800, datatype="BYTES"), 800, True),
        (binary(5, datatype="NOVEL"), 5, True),  # Triton knows
        (binary(True), 1, False),
        (binary("8"), 8, False),
        (binary(-8), 0, False),
        (binary(8.0), 8, False),
        (binary(8, data=[1, 2]), 8, False),  # both here and there
        (body(), 8, False),
        (binary(2**40, shape=[2**38]), 2**40, True),  # how much may come is told elsewhere
    ],
)
def test_what_comes_behind_the_json_is_what_its_tensors_declare(
    text: bytes, behind: int, taken: bool
) -> None:
    assert accepts(lambda one: check_infer(one, FACTS, binary_bytes=behind), text) is taken


def test_numbers_that_json_does_not_have_are_taken_up_to_a_count() -> None:
    for count, taken in ((100_000, True), (100_001, False)):
        text = b'{"inputs":[{"name":"I","datatype":"FP32","shape":[%d],"data":[%b]}]}' % (
            count,
            b",".join([b"NaN"] * count),
        )
        assert accepts(lambda one: check_infer(one, FACTS), text) is taken


def test_numbers_that_json_does_not_have_stand_in_data_alone() -> None:
    for word in (b"NaN", b"Infinity", b"-Infinity", b"Inf", b"-Inf"):
        text = b'{"inputs":[{"name":"I","datatype":"FP32","shape":[1],"data":[%b]}]}' % word
        assert check_infer(text, FACTS) == text
        assert check_generate(b'{"x":[%b,"%b"]}' % (word, word)) == b'{"x":[%b,"%b"]}' % (word, word)
        for elsewhere in (
            b'{"inputs":[{"name":"I","shape":[%b],"datatype":"FP32","data":[1]}]}',
            b'{"inputs":[],"parameters":{"a":%b}}',
            b'{"inputs":%b}',
            b'{"inputs":[],"id":%b}',
        ):
            assert not accepts(infer, elsewhere % word), elsewhere
    with pytest.raises(Refusal, match="9e999"):
        check_generate(b'{"x":[NaN,9e9991]}')
    assert check_generate(b'{"x":[9e9991]}') == b'{"x":[9e9991]}'


@pytest.mark.parametrize(
    ("text", "ready"),
    [(b"", False), (b"{}", False), (b'{"ready":true}', True), (b'{"ready":false,"x":1}', False)],
)
def test_the_index_is_asked_for_what_is_ready_or_for_all(text: bytes, ready: bool) -> None:
    assert asks_for_ready_only(text) is ready
    for wrong in (b"[]", b'{"ready":1}', b'{"ready":null}', b"{", b"[" * 200_000):
        with pytest.raises(Refusal):
            asks_for_ready_only(wrong)


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_key_that_stands_twice_is_reported_where_that_costs_little(size: int) -> None:
    """Beyond that nothing of the first one goes on either."""
    text = b'{"inputs":[],"id":"a","id":"b","x":"%b"}' % (b"x" * size)
    if size == 10:
        with pytest.raises(Refusal, match="one key twice"):
            infer(text)
    else:
        assert infer(text) == b'{"inputs":[],"id":"b"}'


@pytest.mark.parametrize(
    "data",
    [b'["\\\\",{}]', b'["\\"",{"a":1}]', b'["",null]', b'["a",["b",[{}]]]', b'[null,"null"]', b'["{",null]'],
)
def test_an_object_in_data_is_found_behind_any_string(data: bytes) -> None:
    assert not accepts(infer, nested(1)[:-5] + data + b"}]}")
    text = b'{"inputs":[{"name":"I","datatype":"X","shape":[1],"data":%b}]}'
    assert not accepts(infer, text % data)
    assert not accepts(check_generate, b'{"x":%b,"y":{}}' % data)
    harmless = data.replace(b"{}", b"1").replace(b'{"a":1}', b"1").replace(b',null', b',"null"').replace(b"[null", b"[1")  # fmt: skip
    assert accepts(infer, text % harmless)
    assert accepts(check_generate, b'{"x":%b}' % harmless)


def test_only_the_own_parameters_are_obeyed_and_each_is_looked_at() -> None:
    where = {
        "parameters": b'{"inputs":[],"parameters":{"%b":1}}',
        "inputs[0]": b'{"inputs":[{"name":"I","datatype":"X","shape":[1],"parameters":{"%b":1}}]}',
        "outputs[1]": b'{"inputs":[],"outputs":[{"name":"O"},{"name":"P","parameters":{"%b":1}}]}',
    }
    for place, text in where.items():
        assert accepts(infer, text % b"not_shared_memory")
        with pytest.raises(Refusal, match=f"^{place.replace('[', '.').replace(']', '.')}"):
            infer(text % b"shared_memory_x")
