"""The real NVML port, against a libnvidia-ml built here: no GPU is needed, and every fault can be had."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.gpus import GpuReading, cuda_ordinals

STUB = Path(__file__).parents[2] / "fakes" / "nvml_stub.c"
GIB = 1024**3
TWO = f"count 2\ngpu 0 total={24 * GIB} used={GIB} util=25\ngpu 1 total={8 * GIB} used=0\n"

# Reads once after each line on its standard input, in a process of its own: pynvml loads its library for good.
READER = """
import asyncio, dataclasses, json, sys
import agent.nvml as nvml
from agent.gpus import GpusUnknown

nvml.READ_TIMEOUT_SECONDS = 1.0

async def main():
    try:
        gpus = nvml.NvmlGpus() if "auto" in sys.argv else nvml.NvmlGpus.open()
    except nvml.NvmlMissing as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    for _ in sys.stdin:
        try:
            print(json.dumps([dataclasses.asdict(r) for r in await gpus.read()]), flush=True)
        except GpusUnknown as error:
            print(json.dumps({"unknown": str(error)}), flush=True)

asyncio.run(main())
import os
os._exit(0)  # a call that hangs must not hold up the end of the test
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nvml")
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-o",
        str(directory / "libnvidia-ml.so.1"),
        str(STUB),
    ]
    subprocess.run(command, check=True)
    return directory


class Reader:
    """A process with the stub as its NVML."""

    def __init__(self, library: Path, script: Path, *arguments: str) -> None:
        self._script = script
        env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB": str(script)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER, *arguments],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, script: str | None = None) -> Any:
        if script is not None:
            self._script.write_text(script)
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


@pytest.fixture
def reader(library: Path, tmp_path: Path) -> Any:
    script = tmp_path / "script"
    script.write_text(TWO)
    reader = Reader(library, script)
    yield reader
    reader.close()


def test_sizes_of_several_gpus(reader: Reader) -> None:
    first, second = reader.read()
    assert (first["uuid"], first["index"], first["product"]) == ("GPU-stub-0", 0, "Stub 0")
    assert (first["total_bytes"], first["used_bytes"], first["utilization"]) == (24 * GIB, GIB, 0.25)
    assert (second["total_bytes"], second["utilization"], second["healthy"]) == (8 * GIB, None, True)


def test_an_error_on_one_gpu_hides_no_other(reader: Reader) -> None:
    first, second = reader.read(TWO + "gpu 0 error=999\n")
    assert (first["healthy"], first["total_bytes"]) == (False, None)
    assert (second["healthy"], second["total_bytes"]) == (True, 8 * GIB)


def test_a_lost_gpu_stays_listed_under_its_own_name_and_may_come_back(reader: Reader) -> None:
    reader.read()
    lost, other = reader.read(TWO + "gpu 0 error=15\n")
    assert (lost["uuid"], lost["healthy"], lost["used_bytes"]) == ("GPU-stub-0", False, None)
    assert "lost" in lost["reason"].lower()
    assert other["healthy"]
    assert reader.read(TWO)[0]["healthy"]


def test_mig_off_is_fine_and_mig_on_is_not(reader: Reader) -> None:
    assert reader.read(TWO + "gpu 0 mig=0\n")[0]["healthy"]
    split, other = reader.read(TWO + "gpu 0 mig=1\n")
    assert (split["healthy"], split["reason"].partition(":")[0]) == (False, "MIGEnabled")
    assert other["healthy"]


def test_cuda_counts_by_bus_id_what_is_neither_lost_nor_split(reader: Reader) -> None:
    swapped = TWO + "gpu 0 bus=200\ngpu 1 bus=7\n"
    assert [gpu["bus_id"] for gpu in reader.read(swapped)] == ["00000000:C8:00.0", "00000000:07:00.0"]
    assert ordinals(reader.read()) == {"GPU-stub-1": 0, "GPU-stub-0": 1}
    assert ordinals(reader.read(swapped + "gpu 1 error=15\n")) == {"GPU-stub-0": 0}
    assert ordinals(reader.read(swapped + "gpu 1 mig=1\n")) == {"GPU-stub-0": 0}


def ordinals(answer: Any) -> dict[str, int]:
    return {str(uuid): number for uuid, number in cuda_ordinals(GpuReading(**gpu) for gpu in answer).items()}


def test_a_call_that_hangs_makes_the_facts_unknown_and_the_end_of_it_known_again(reader: Reader) -> None:
    assert "has not answered" in reader.read(TWO + "hang 1\n")["unknown"]
    assert "has not answered" in reader.read()["unknown"]  # no second call is begun
    reader._script.write_text(TWO)
    answers = [reader.read() for _ in range(2)]
    assert isinstance(answers[-1], list)


def test_a_machine_without_a_driver_says_so(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("init error=9\n")
    reader = Reader(library, script)
    assert "NVML" in reader.answer()["missing"]
    reader.close()


@pytest.mark.parametrize("calls_that_work", ["", " count=1"])
def test_a_driver_that_is_loaded_again_is_found_again(reader: Reader, calls_that_work: str) -> None:
    assert reader.read()[0]["healthy"]
    away = reader.read(TWO + f"driver 2{calls_that_work}\n")
    assert "unknown" in away or not any(gpu["healthy"] for gpu in away)
    first, second = reader.read()
    assert (first["total_bytes"], second["total_bytes"]) == (24 * GIB, 8 * GIB)


def test_a_driver_that_is_away_for_a_while_is_found_again(reader: Reader) -> None:
    reader.read()
    for _ in range(3):
        assert "unknown" in reader.read(TWO + "driver 2\ninit error=9\n")
    assert reader.read(TWO + "driver 2\n")[0]["healthy"]


def test_one_gpu_that_is_lost_costs_the_others_nothing(reader: Reader) -> None:
    """NVML is not opened anew while it answers for any GPU: its next reading is of the same session."""
    reader.read()
    reader.read(TWO + "gpu 0 error=15\n")
    assert reader.read(TWO + "gpu 0 error=15\ninit error=9\n")[1]["healthy"]


def test_a_driver_that_comes_late_is_found(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("init error=9\n")
    reader = Reader(library, script, "auto")
    for _ in range(2):
        assert "NVML" in reader.read()["unknown"]
    assert [gpu["uuid"] for gpu in reader.read(TWO)] == ["GPU-stub-0", "GPU-stub-1"]
    reader.close()
