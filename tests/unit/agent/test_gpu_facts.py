"""The GPU facts of a report: known or not, and the use by other processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent.gpu_facts import HYSTERESIS_BYTES, GpuFacts, OtherUse, gpu_reports
from agent.gpus import (
    GpuReading,
    GpusHang,
    GpusUnknown,
)
from agent.mock_gpus import MockGpus
from agent.models import Models
from agent.repository import Record
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.pod import PodRef
from berth.contract.report import GpuReport
from tests.fakes.objects import GIB

A = GpuUuid("GPU-a")


SCENARIO = """
gpus:
  - {uuid: GPU-a, product: A10, total: 24Gi, other_use: 1Gi, utilization: 0.25}
  - {uuid: GPU-b, total: 8Gi, error: ECC}
  - {uuid: GPU-c, total: 8Gi, lost: true}
  - {uuid: GPU-d, total: 8Gi, mig: true}
models: {resnet: 10Gi, "*": requested}
"""


async def test_facts_are_unknown_while_the_scenario_is_broken_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(SCENARIO)
    facts = GpuFacts(MockGpus(path, list), lambda: 0)
    await facts.refresh()
    path.write_text("gpus: [")
    with pytest.raises(GpusUnknown, match=r"gpus.yaml"):
        await facts.read_now()
    await facts.refresh()
    assert [(r.uuid, r.total_bytes, r.healthy) for r in facts.readings][:1] == [(A, None, False)]
    path.write_text(SCENARIO)
    await facts.refresh()
    assert facts.readings[0].total_bytes == 24 * GIB


class Driver:
    """A port that answers or raises what it is told to."""

    instance_kind = "KIND_GPU"

    def __init__(self) -> None:
        self.error: GpusUnknown | None = None
        self.answer: tuple[GpuReading, ...] = ()

    async def read(self) -> tuple[GpuReading, ...]:
        if self.error is not None:
            raise self.error
        return self.answer


async def test_gpus_that_were_never_seen_are_unknown_and_not_absent() -> None:
    driver = Driver()
    facts = GpuFacts(driver, lambda: 0)
    driver.error = GpusUnknown("NVML has not answered for 5 s")
    await facts.refresh()
    with pytest.raises(GpusUnknown, match="has not answered"):
        facts.listed()
    driver.error, driver.answer = None, (reading(0),)
    await facts.refresh()
    driver.error = GpusUnknown("NVML has not answered for 5 s")
    await facts.refresh()
    assert [gpu.uuid for gpu in facts.listed()] == [A]  # unknown, but here


async def test_only_a_call_that_does_not_return_counts_as_hanging() -> None:
    now, driver = [100.0], Driver()
    facts = GpuFacts(driver, lambda: 0, clock=lambda: now[0])
    for error, after, hanging in (
        (GpusUnknown("no driver"), 50.0, 0.0),
        (GpusHang("no answer"), 0.0, 0.0),
        (GpusHang("no answer"), 70.0, 70.0),
        (GpusUnknown("no driver"), 10.0, 0.0),
        (GpusHang("no answer"), 5.0, 0.0),
        (None, 5.0, 0.0),
    ):
        driver.error = error
        now[0] += after
        await facts.refresh()
        assert facts.hanging_seconds == hanging


def reading(used: int | None) -> GpuReading:
    return GpuReading(A, 0, "A10", 24 * GIB, used, 0.0)


def test_other_use_is_what_no_model_accounts_for() -> None:
    other_use = OtherUse()
    assert other_use.of(reading(10 * GIB), taken_bytes=4 * GIB, settled=True) == 6 * GIB
    assert other_use.of(reading(None), taken_bytes=0, settled=True) is None
    assert OtherUse().of(reading(GIB), taken_bytes=2 * GIB, settled=True) == 0


def test_other_use_stays_while_a_model_comes_or_goes() -> None:
    other_use = OtherUse()
    other_use.of(reading(GIB), taken_bytes=0, settled=True)
    assert other_use.of(reading(9 * GIB), taken_bytes=0, settled=False) == GIB
    assert other_use.of(reading(9 * GIB), taken_bytes=8 * GIB, settled=True) == GIB


def test_other_use_goes_up_at_once_and_down_in_steps() -> None:
    other_use = OtherUse()
    other_use.of(reading(GIB), taken_bytes=0, settled=True)
    assert other_use.of(reading(GIB + 1), taken_bytes=0, settled=True) == GIB + 1
    assert other_use.of(reading(GIB + 1 - HYSTERESIS_BYTES), taken_bytes=0, settled=True) == GIB + 1
    assert (
        other_use.of(reading(GIB - HYSTERESIS_BYTES), taken_bytes=0, settled=True) == GIB - HYSTERESIS_BYTES
    )


@pytest.mark.parametrize(("takes", "other_use"), [(5, 2), (4, 1), (3, 0)])
async def test_what_was_loaded_while_unobserved_is_not_other_use_as_well(
    tmp_path: Path, takes: int, other_use: int
) -> None:
    """An agent that was started anew during a load cannot tell what that load has taken."""
    path, models, asked = tmp_path / "gpus.yaml", Models(), 4 * GIB
    path.write_text(f"gpus: [{{uuid: GPU-a, total: 24Gi, other_use: 1Gi}}]\nmodels: {{m: {takes}Gi}}")
    ref = PodRef("team", "p1", PodUid("p1"))
    models.set_resident(
        models.adopt(Record(ref, None, ModelName("m"), GpuChoice(A, 0, asked), "digest")), True
    )
    facts = GpuFacts(MockGpus(path, models.residents), lambda: models.residency)
    await facts.refresh()
    (told,) = gpu_reports(facts, models, OtherUse(), busy=(), headroom_bytes=0)
    assert told.other_use_bytes == other_use * GIB
    assert free_bytes(told, reserved_bytes(asked, None)) == 24 * GIB - max(asked, (takes + 1) * GIB)


BROKEN = GpuReading(A, 0, "T4", None, None, None, healthy=False, reason="XID 79", broken=True)


async def test_a_gpu_that_is_gone_is_reported_as_broken_while_triton_holds_a_model_on_it() -> None:
    models, driver = holding(GIB), Driver()
    facts = GpuFacts(driver, lambda: models.residency)
    other = replace(reading(GIB), uuid=GpuUuid("GPU-b"), index=1)

    def told() -> list[tuple[str, bool, bool]]:
        reports = gpu_reports(facts, models, OtherUse(), busy=(), headroom_bytes=0)
        return [(one.uuid, one.healthy, one.broken) for one in reports]

    driver.error = GpusUnknown("no driver")
    await facts.refresh()
    assert told() == []  # nothing has ever been seen: it may well be there
    driver.error, driver.answer = None, (other,)
    await facts.refresh()
    assert told() == [("GPU-b", True, False), (A, False, True)]
    for model in models:
        models.set_resident(model, False)
    assert told() == [("GPU-b", True, False)]


async def test_what_is_broken_stays_so_while_nothing_can_be_read_and_its_turns_are_news() -> None:
    driver = Driver()
    facts = GpuFacts(driver, lambda: 0)
    driver.answer = (reading(GIB),)
    await facts.refresh()
    assert facts.have_changed()
    await facts.refresh()
    assert not facts.have_changed()
    driver.answer = (BROKEN,)
    await facts.refresh()
    assert facts.have_changed()
    driver.error = GpusUnknown("no driver")
    await facts.refresh()
    (still,) = facts.readings
    assert (still.broken, still.reason, facts.have_changed()) == (True, "XID 79", False)
    driver.error, driver.answer = None, (reading(GIB),)
    await facts.refresh()
    assert facts.have_changed()
    driver.error = GpusUnknown("no driver")
    await facts.refresh()
    (unknown,) = facts.readings
    assert (unknown.broken, unknown.reason, facts.have_changed()) == (False, "no driver", False)


async def test_a_failure_with_the_gpus_is_logged_once_and_its_end_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="agent.gpu_facts")
    driver = Driver()
    facts = GpuFacts(driver, lambda: 0)
    for driver.error in (None, None, GpusUnknown("no driver"), GpusUnknown("no driver"), None, None):
        await facts.refresh()
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "gpu facts unknown"),
        ("INFO", "gpu facts known again"),
    ]


async def test_a_reading_counts_as_of_when_it_was_begun() -> None:
    residency = [5]

    class Slow(Driver):
        async def read(self) -> tuple[GpuReading, ...]:
            residency[0] += 1  # a model comes meanwhile
            return (reading(7),)

    facts = GpuFacts(Slow(), lambda: residency[0])
    assert facts.residency < 5
    assert await facts.read_now() == (reading(7),)
    assert (facts.residency, facts.instance_kind) == (5, "KIND_GPU")


def holding(measured: int) -> Models:
    """A table with one model on GPU-a that Triton holds."""
    models = Models()
    record = Record(PodRef("n", "p", PodUid("p")), None, ModelName("m"), GpuChoice(A, 0, 1), "d")
    model = models.adopt(record)
    models.set_resident(model, True)
    model.measured_bytes = measured
    return models


async def test_the_reports_gpus_are_what_was_read_without_what_is_ours() -> None:
    models, other_use, driver = holding(3 * GIB), OtherUse(), Driver()
    facts = GpuFacts(driver, lambda: models.residency)
    driver.answer = (replace(reading(4 * GIB), healthy=False, reason="ECC"),)

    def reported(*, busy: set[GpuUuid] | None = None) -> GpuReport:
        (only,) = gpu_reports(facts, models, other_use, busy=busy or set(), headroom_bytes=9)
        return only

    await facts.refresh()
    first = reported()
    assert first == GpuReport(
        uuid=A,
        index=0,
        product="A10",
        total_bytes=24 * GIB,
        other_use_bytes=GIB,
        headroom_bytes=9,
        healthy=False,
        reason="ECC",
    )
    driver.answer = (reading(8 * GIB),)
    await facts.refresh()
    assert reported(busy={A}).other_use_bytes == GIB  # something is being loaded there
    models.residency += 1
    assert reported().other_use_bytes == GIB  # the reading is older than what has come since
    await facts.refresh()
    assert reported(busy={GpuUuid("GPU-b")}).other_use_bytes == 5 * GIB
    driver.error = GpusUnknown("no driver")
    await facts.refresh()
    gone = reported()
    assert (gone.uuid, gone.product, gone.total_bytes, gone.other_use_bytes) == (A, "A10", None, None)
    assert (gone.healthy, gone.reason) == (False, "no driver")
