"""What large bodies cost the proxy: each in a process of its own, by the processor's time and the peak of memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

SIZE = 4 * 1024**2
_START = b'{"inputs":[{"name":"a","datatype":"BYTES","shape":[1],"data":['
_END = b"1]}]}"
_TENSOR = b'{"name":"a","datatype":"X","shape":[1]}'


def _filled(unit: bytes, start: bytes = _START, end: bytes = _END) -> bytes:
    return start + unit * ((SIZE - len(start) - len(end)) // len(unit)) + end


def _numbered(start: bytes, end: bytes) -> bytes:
    return start + b",".join(b'"%x":1' % number for number in range(SIZE // 11)) + end


BODIES: dict[str, Callable[[], bytes]] = {
    "a long string with a brace": lambda: _filled(b"a", _START + b'"{', b'",' + _END),
    "a long string before NaN": lambda: _filled(b"a", _START + b'"', b'",NaN,' + _END),
    "escapes": lambda: _filled(b"\\n", _START + b'"{', b'",' + _END),
    "escaped quotes": lambda: _filled(b'\\"', _START + b'"{', b'",' + _END),
    "backslashes": lambda: _filled(b"\\\\", _START + b'"{', b'",' + _END),
    "escaped characters": lambda: _filled(b"\\u00e9", _START + b'"{', b'",' + _END),
    "characters of four bytes": lambda: _filled("\U0001f600".encode(), _START + b'"{', b'",' + _END),
    "short strings": lambda: _filled(b'"a",'),
    "short strings with braces": lambda: _filled(b'"{",'),
    "short strings with brackets": lambda: _filled(b'["["],'),
    "short strings with colons": lambda: _filled(b'"a:b",'),
    "short strings that say null": lambda: _filled(b'"null",'),
    "empty lists": lambda: _filled(b"[],"),
    "empty lists and a null": lambda: _filled(b"[],", b'{"x":null,' + _START[1:]),
    "rows": lambda: _filled(b"[1,2,3],"),
    "towers": lambda: _filled(b"[" * 40 + b"]" * 40 + b","),
    "nesting without an end": lambda: _filled(b"[", end=b""),
    "numbers": lambda: _filled(b"1,"),
    "fractions beside another script": lambda: _filled(b"1.5,", '{"é":1,'.encode() + _START[1:]),
    "NaN": lambda: _filled(b"NaN,"),
    "infinity": lambda: _filled(b"-Infinity,"),
    "spaces": lambda: _filled(b" "),
    "tensors": lambda: _filled(_TENSOR + b",", b'{"inputs":[', _TENSOR + b"]}"),
    "outputs": lambda: _filled(b'{"name":""},', b'{"inputs":[],"outputs":[', b'{"name":""}]}'),
    "tensors and classes of outputs": lambda: (
        b'{"inputs":[%b],"outputs":[%b]}'
        % (
            b",".join([_TENSOR] * 6000),
            b",".join([b'{"name":"a","parameters":{"classification":1}}'] * 10_000),
        )
    ).ljust(SIZE),
    "parameters": lambda: _numbered(b'{"inputs":[],"parameters":{', b"}}"),
    "unknown keys": lambda: _numbered(b'{"inputs":[],"x":{', b"}}"),
    "unknown objects": lambda: _filled(b"{},", b'{"inputs":[],"x":[', b"1]}"),
    "sizes": lambda: _filled(b"300,", b'{"inputs":[{"name":"a","datatype":"X","shape":[', b"1]}]}"),
    "generate: empty lists": lambda: _filled(b"[],", b'{"a":[', b"1]}"),
    "generate: objects": lambda: _filled(b"{},", b'{"a":[', b"1]}"),
    "generate: keys": lambda: _numbered(b"{", b"}"),
    "generate: text": lambda: _filled(b'{:\\"', b'{"text_input":"', b'"}'),
    "index: empty lists": lambda: _filled(b"[],", b'{"a":[', b"1]}"),
}

# Takes cases from its input; each is measured in a fork, which begins with as little memory as the one before.
_MEASURER = """
import json, os, sys, time
from proxy.policy.refusal import Refusal
from proxy.policy import json_guard
from proxy.policy.model_facts import ModelFacts
checks = {"generate": json_guard.check_generate, "index": json_guard.asks_for_ready_only}
def check_infer(body):
    json_guard.check_infer(body, ModelFacts(fixed_outputs=frozenset({'a'})))
def peak():
    with open("/proc/self/status") as status:
        (line,) = [one for one in status if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
def measure(what, body):
    before, began = peak(), time.process_time()
    try:
        checks.get(what, check_infer)(body)
    except Refusal:
        pass
    print(json.dumps([time.process_time() - began, peak() - before]), flush=True)
while line := sys.stdin.buffer.readline():
    what, size = json.loads(line)
    body = sys.stdin.buffer.read(size)
    if not os.fork():
        measure(what, body)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def measurer() -> Iterator[subprocess.Popen[bytes]]:
    # Without this glibc keeps large pieces that were freed, in which a fork could grow unseen.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _MEASURER], stdin=pipe, stdout=pipe, env=environment) as one:
        yield one


@pytest.mark.parametrize("case", BODIES)
def test_large_bodies_cost_little(measurer: subprocess.Popen[bytes], case: str) -> None:
    """Little is 0.02 s of a quiet core for a MiB, and the body three times; the bounds leave room, and a bad way
    takes far more."""
    body, what = BODIES[case](), case.partition(":")[0]
    assert SIZE * 0.85 < len(body) <= SIZE
    assert measurer.stdin is not None
    assert measurer.stdout is not None
    measurer.stdin.write(json.dumps([what, len(body)]).encode() + b"\n" + body)
    measurer.stdin.flush()
    seconds, grown = json.loads(measurer.stdout.readline())
    assert seconds < 0.1 * SIZE / 1024**2
    assert grown < 6 * SIZE, grown / SIZE
