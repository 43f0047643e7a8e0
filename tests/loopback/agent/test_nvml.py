"""The real NVML port, against a libnvidia-ml built here: no GPU is needed, and every fault can be had."""

import json
import os
import subprocess
import sys
import time
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

    def until(self, script: str | None, gpu: int, failure: str) -> Any:
        """Read until that GPU's reason begins so: what an event says is known a moment after it."""
        for _ in range(100):
            readings = self.read(script)
            if (failure and readings[gpu]["reason"].startswith(failure)) or readings[gpu][
                "reason"
            ] == failure:
                return readings[gpu]
            time.sleep(0.05)
        raise AssertionError(f"{readings[gpu]} is never {failure!r}")

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


FAULTS = {
    "uncorrected errors": ("ecc=3", "ECC: 3 uncorrected"),
    "a row to be remapped": ("pending=1", "RowRemapPending"),
    "a row that could not be": ("failed=1", "RowRemapFailure"),
    "a page to be retired": ("pages=1", "PageRetirementPending"),
    "lost": ("error=15", "NVML: GPU is lost"),
    "to be reset": ("error=16", "NVML"),
}


@pytest.mark.parametrize("case", sorted(FAULTS))
def test_a_fault_of_one_gpu_is_reported_and_a_reset_heals_it(reader: Reader, case: str) -> None:
    line, reason = FAULTS[case]
    assert reader.read()[0]["healthy"]
    sick, well = reader.read(TWO + f"gpu 0 {line}\n")
    assert (sick["uuid"], sick["healthy"], sick["broken"]) == ("GPU-stub-0", False, True)
    assert sick["reason"].startswith(reason)
    assert (well["healthy"], well["broken"]) == (True, False)
    assert reader.read(TWO)[0]["healthy"]


def test_what_a_card_does_not_tell_is_no_fault(reader: Reader) -> None:
    for quiet in ("", "gpu 0 ecc=0 pending=0 failed=0 pages=0\n", "gpu 0 odd=13\n", "gpu 0 odd=4\n"):
        assert [(gpu["healthy"], gpu["reason"]) for gpu in reader.read(TWO + quiet)] == [(True, "")] * 2
    unknown = reader.read(TWO + "gpu 0 odd=999\n")[0]
    assert (unknown["healthy"], unknown["broken"]) == (False, False)


@pytest.mark.parametrize("xid", [48, 74, 79, 94, 95, 119])
def test_a_critical_xid_makes_its_gpu_unhealthy_and_no_other(reader: Reader, xid: int) -> None:
    reader.read()
    sick = reader.until(TWO + f"gpu 1 xid={xid}\n", 1, f"XID {xid} (")
    assert (sick["healthy"], sick["broken"], sick["total_bytes"]) == (False, True, 8 * GIB)
    first, second = reader.read(TWO)  # it stands, although it is told once
    assert (first["healthy"], second["healthy"]) == (True, False)


def test_an_application_s_xid_breaks_no_gpu(reader: Reader) -> None:
    """The events of one GPU come in order: 48 shows that 13 and the others have been heard."""
    reader.read()
    for nth, xid in enumerate((13, 31, 43, 45, 68, 109, 63), start=2):
        reader.read(TWO + f"gpu 0 xid={xid} nth={nth}\n")
        time.sleep(0.1)
        assert reader.read()[0]["healthy"]
    reader.until(TWO + "gpu 0 xid=48\n", 0, "XID 48 (")


HEALS = {
    "the driver is loaded again": "driver 2\n",
    "the gpu was lost and answers again": "gpu 0 error=15\n",
}


@pytest.mark.parametrize("case", sorted(HEALS))
def test_a_reset_heals_what_an_xid_has_said_and_the_next_one_is_heard(reader: Reader, case: str) -> None:
    reader.read()
    reader.until(TWO + "gpu 0 xid=95\n", 0, "XID 95")
    reader.read(TWO + HEALS[case])
    time.sleep(0.1)  # the driver has forgotten who listened
    after = TWO + ("driver 2\n" if "driver" in case else "")
    reader.until(after, 0, "")
    reader.until(after + "gpu 0 xid=79 nth=2\n", 0, "XID 79")


def test_a_count_of_errors_that_begins_anew_is_a_reset(reader: Reader) -> None:
    reader.read(TWO + "gpu 0 ecc=2\n")
    reader.until(TWO + "gpu 0 ecc=2 xid=48\n", 0, "XID 48")
    assert reader.read(TWO + "gpu 0 ecc=0\n")[0]["healthy"]


def test_a_card_that_tells_of_no_events_and_a_thread_that_hears_nothing_cost_no_reading(
    reader: Reader,
) -> None:
    assert reader.read(TWO + "gpu 0 events=0\n")[0]["healthy"]
    reader.until(TWO + "gpu 0 events=0\ngpu 1 xid=79\n", 1, "XID 79")
    deaf = TWO + "deaf 1\n"
    time.sleep(0.1)
    assert len(reader.read(deaf)) == 2
    assert len(reader.read(deaf + "gpu 0 error=15\n")) == 2  # its end is not waited for for ever
    assert reader.read(deaf)[0]["healthy"]
