"""The published traces as the packing bench reads them, and what it makes of refusals."""

from pathlib import Path

import pytest

from bench.packing.churn import Refusals
from bench.packing.trace import GPU_BYTES, Task, demand, read_tasks

WHOLE = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "a,12000,16384,1,460,V100M16|P100,LS,Running,10,30,10\n"
)


def read(tmp_path: Path, text: str) -> Task:
    path = tmp_path / "pods.csv"
    path.write_text(text)
    (task,) = read_tasks(path)
    return task


def test_a_whole_row(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == Task("a", 12000, 16384, 1, 460, ("P100", "V100M16"), 10, 30)


@pytest.mark.parametrize(
    ("text", "memory_mib"),
    [
        ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,12000,16384,1,460\n", 16384),
        ("name,cpu_milli,num_gpu,gpu_milli,gpu_spec\na,12000,1,460,\n", 0),
    ],
)
def test_files_without_the_last_columns_or_the_memory(tmp_path: Path, text: str, memory_mib: int) -> None:
    assert read(tmp_path, text) == Task("a", 12000, memory_mib, 1, 460, (), 0, 0)


def test_a_task_requests_all_of_each_of_its_gpus() -> None:
    """ecosystem A4: a pod's limit is the total of its GPUs."""
    shape = demand(Task("t", 1, 1, 8, GPU_BYTES, (), 0, 0), "t").shape
    assert (shape.gpu_count, shape.request_bytes) == (8, GPU_BYTES)


def test_refusals_are_weighed_by_gpus_by_gpu_seconds_and_by_class() -> None:
    refusals = Refusals()

    def note(gpu_count: int, gpu_bytes: int, life: float, *, placed: bool) -> None:
        refusals.note(Task("t", 1, 1, gpu_count, gpu_bytes, (), 0, 0), life, placed=placed)

    note(8, 1000, 1.0, placed=False)
    note(1, 500, 40.0, placed=True)
    note(1, 500, 8.0, placed=False)
    note(0, 0, 99.0, placed=False)  # asks for no GPU
    assert refusals.percent() == pytest.approx(
        {
            "GPUs": 100 * 8.5 / 9,
            "GPU-seconds": 100 * 12 / 32,
            "GPU-seconds: 8 GPUs": 100,
            "GPU-seconds: part of a GPU": 100 * 8 / 48,
        }
    )
