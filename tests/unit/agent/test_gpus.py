from dataclasses import replace
from pathlib import Path

import pytest

from agent.gpu_facts import HYSTERESIS_BYTES, GpuFacts, OtherUse, gpu_reports
from agent.gpus import (
    GpuReading,
    GpusHang,
    GpusUnknown,
    NoGpus,
    cuda_ordinals,
    grown_instead,
    nameless,
    trouble_of,
)
from agent.mock_gpus import MockGpus, Resident, parse_scenario
from agent.models import Models
from agent.reporter import gauge_annotations, node_total
from agent.repository import Record
from berth.contract.errors import InvalidValue
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.pod import PodRef
from berth.contract.report import GpuReport
from tests.fakes.objects import GIB, gpu, report

A = GpuUuid("GPU-a")
SCENARIO = """
gpus:
  - {uuid: GPU-a, product: A10, total: 24Gi, foreign: 1Gi, utilization: 0.25}
  - {uuid: GPU-b, total: 8Gi, error: ECC}
  - {uuid: GPU-c, total: 8Gi, lost: true}
  - {uuid: GPU-d, total: 8Gi, mig: true}
models: {resnet: 10Gi, "*": requested}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "scenario is not a mapping"),
        ("gpus: 3", "gpus is not a list"),
        ("gpus: [{total: 1}]", r"gpus\[0\].uuid is missing"),
        ("gpus: [{uuid: a}]", r"gpus\[0\].total is missing"),
        ("gpus: [{uuid: a, total: 1Gib}]", r"gpus\[0\].total: '1Gib' is not a quantity"),
        (
            "gpus: [{uuid: a, total: 1, totl: 1}]",
            r"gpus\[0\].totl is not a field; known are ecc, error, foreign",
        ),
        ("gpus: [{uuid: a, total: 1, lost: maybe}]", r"gpus\[0\].lost is 'maybe'"),
        ("gpus: [{uuid: a, total: 1, utilization: 7}]", "utilization is 7"),
        ("gpus: [{uuid: a, total: 1, utilization: -0.1}]", "utilization is -0.1; 0 to 1"),
        ("gpus: [{uuid: a, total: 1, utilization: high}]", "utilization is 'high'; 0 to 1"),
        ("gpus: [{uuid: a, total: 1, mig: 1}]", r"gpus\[0\].mig is 1; true or false"),
        ("gpus: [{uuid: a, total: 1, xid: many}]", r"gpus\[0\].xid is 'many'; a whole number"),
        ("gpus: [{uuid: a, total: 1, ecc: -1}]", r"gpus\[0\].ecc is -1"),
        ("gpus: [{uuid: a, total: 1, remap: soon}]", r"gpus\[0\].remap is 'soon'; pending or failed"),
        ("gpus: [{uuid: a, total: 1, foreign: x}]", r"gpus\[0\].foreign: 'x'"),
        ("gpus: [{uuid: a, total: 1, x: 1, 3: 1}]", r"gpus\[0\].3 is not a field"),
        ("gpus: [3]", r"gpus\[0\] is not a mapping"),
        ("gpus: []\nmodels: [m]", "models is not a mapping"),
        ("gpus: []\nmodel: {}", "scenario.model is not a field; known are gpus, models"),
        ("gpus: [{uuid: a, total: 1}, {uuid: a, total: 1}]", "one uuid twice"),
        ("gpus: []\nmodels: {m: lots}", "models.m: 'lots' is not a quantity"),
        ("gpus: [", "line 1"),
    ],
)
def test_a_scenario_with_an_error_says_where(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_scenario(text)


def test_a_scenario_says_only_what_matters_to_it() -> None:
    scenario = parse_scenario("gpus: [{uuid: 5, total: 1Gi}]")
    (gpu,) = scenario.gpus
    assert (gpu.uuid, gpu.product, gpu.total_bytes, gpu.other_use_bytes) == ("5", "mock GPU", GIB, 0)
    assert (gpu.utilization, gpu.lost, gpu.error, gpu.mig) == (0.0, False, "", False)
    for named, taken in (("m", 7), ("other", 3)):  # without `models`, and with one that is meant
        of = parse_scenario("gpus: []\nmodels: {m: 7}")
        assert of.taken_by(Resident(ModelName(named), A, 3)) == taken
    assert scenario.taken_by(Resident(ModelName("m"), A, 3)) == 3


async def test_a_mock_gpu_gives_no_more_than_it_has_and_only_to_its_own(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text("gpus: [{uuid: GPU-a, total: 4Gi, utilization: 1}, {uuid: GPU-b, total: 4Gi}]")
    mock = MockGpus(path, lambda: [Resident(ModelName("m"), A, 9 * GIB)])
    a, b = await mock.read()
    assert (a.index, a.used_bytes, a.utilization, a.product) == (0, 4 * GIB, 1.0, "mock GPU")
    assert (b.index, b.used_bytes, b.in_cuda, b.reason) == (1, 0, True, "")
    path.write_text(
        "gpus: [{uuid: GPU-a, total: 4Gi, mig: true, error: ECC}, {uuid: GPU-b, total: 1, lost: true}]"
    )
    a, b = await mock.read()
    assert (a.reason, a.healthy, a.in_cuda) == ("MIGEnabled", False, False)
    assert (b.reason, b.healthy, b.in_cuda, b.utilization, b.product) == (
        "GPU is lost",
        False,
        False,
        None,
        "mock GPU",
    )
    path.unlink()
    with pytest.raises(GpusUnknown, match=r"gpus\.yaml: No such file"):
        await mock.read()


async def test_mock_gpus_follow_the_file_and_what_triton_holds(tmp_path: Path) -> None:
    path, held = (
        tmp_path / "gpus.yaml",
        [Resident(ModelName("resnet"), A, 5), Resident(ModelName("x"), A, 2 * GIB)],
    )
    path.write_text(SCENARIO)
    mock = MockGpus(path, lambda: held)
    a, b, c, d = await mock.read()
    assert (a.total_bytes, a.used_bytes, a.utilization, a.healthy) == (24 * GIB, 13 * GIB, 0.25, True)
    assert (b.healthy, b.reason, b.used_bytes) == (False, "ECC", 0)
    assert (c.healthy, c.total_bytes, c.used_bytes) == (False, None, None)
    assert (d.healthy, d.reason) == (False, "MIGEnabled")
    assert cuda_ordinals([a, b, c, d]) == {"GPU-a": 0, "GPU-b": 1}
    held.clear()
    path.write_text(SCENARIO.replace("foreign: 1Gi", "foreign: 3Gi"))
    assert (await mock.read())[0].used_bytes == 3 * GIB


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


async def test_gpus_that_were_never_seen_are_unknown_and_not_absent() -> None:
    class Silent:
        instance_kind = "KIND_GPU"
        answer: tuple[GpuReading, ...] | None = None

        async def read(self) -> tuple[GpuReading, ...]:
            if self.answer is None:
                raise GpusUnknown("NVML has not answered for 5 s")
            return self.answer

    port = Silent()
    facts = GpuFacts(port, lambda: 0)
    await facts.refresh()
    with pytest.raises(GpusUnknown, match="has not answered"):
        facts.listed()
    port.answer = (reading(0),)
    await facts.refresh()
    port.answer = None
    await facts.refresh()
    assert [gpu.uuid for gpu in facts.listed()] == [A]  # unknown, but here


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


def test_foreign_is_what_no_model_accounts_for() -> None:
    foreign = OtherUse()
    assert foreign.of(reading(10 * GIB), taken_bytes=4 * GIB, settled=True) == 6 * GIB
    assert foreign.of(reading(None), taken_bytes=0, settled=True) is None
    assert OtherUse().of(reading(GIB), taken_bytes=2 * GIB, settled=True) == 0


def test_foreign_stays_while_a_model_comes_or_goes() -> None:
    foreign = OtherUse()
    foreign.of(reading(GIB), taken_bytes=0, settled=True)
    assert foreign.of(reading(9 * GIB), taken_bytes=0, settled=False) == GIB
    assert foreign.of(reading(9 * GIB), taken_bytes=8 * GIB, settled=True) == GIB


def test_foreign_goes_up_at_once_and_down_in_steps() -> None:
    foreign = OtherUse()
    foreign.of(reading(GIB), taken_bytes=0, settled=True)
    assert foreign.of(reading(GIB + 1), taken_bytes=0, settled=True) == GIB + 1
    assert foreign.of(reading(GIB + 1 - HYSTERESIS_BYTES), taken_bytes=0, settled=True) == GIB + 1
    assert foreign.of(reading(GIB - HYSTERESIS_BYTES), taken_bytes=0, settled=True) == GIB - HYSTERESIS_BYTES


@pytest.mark.parametrize(("takes", "foreign"), [(5, 2), (4, 1), (3, 0)])
async def test_what_was_loaded_while_nobody_looked_is_not_foreign_as_well(
    tmp_path: Path, takes: int, foreign: int
) -> None:
    """An agent that was started anew during a load cannot tell what that load has taken."""
    path, models, asked = tmp_path / "gpus.yaml", Models(), 4 * GIB
    path.write_text(f"gpus: [{{uuid: GPU-a, total: 24Gi, foreign: 1Gi}}]\nmodels: {{m: {takes}Gi}}")
    ref = PodRef("team", "p1", PodUid("p1"))
    models.set_resident(
        models.adopt(Record(ref, None, ModelName("m"), GpuChoice(A, 0, asked), "digest")), True
    )
    facts = GpuFacts(MockGpus(path, models.residents), lambda: models.residency)
    await facts.refresh()
    (told,) = gpu_reports(facts, models, OtherUse(), busy=(), headroom_bytes=0)
    assert told.other_use_bytes == foreign * GIB
    assert free_bytes(told, reserved_bytes(asked, None)) == 24 * GIB - max(asked, (takes + 1) * GIB)


def test_the_annotations_of_the_proof_of_concept() -> None:
    assert node_total(report(gpu("a"), gpu("b", index=1), gpu("c", index=2, healthy=False))) == str(32 * GIB)
    assert node_total(report(gpu(total=None))) is None  # unknown, not 0
    keys = Keys()
    gauges = gauge_annotations([reading(3), reading(4)], keys)
    assert gauges == {keys.node_used: "7", keys.node_util: "0.00"}
    assert gauge_annotations([], keys) == {keys.node_used: None, keys.node_util: None}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("xid: 79", "XID 79 (GPU has fallen off the bus)"),
        ("ecc: 2", "ECC: 2 uncorrected"),
        ("remap: pending", "RowRemapPending"),
        ("remap: failed", "RowRemapFailure"),
        ("error: fan", "fan"),
        ("lost: true", "GPU is lost"),
    ],
)
async def test_a_scenario_tells_of_a_gpu_that_is_broken_and_of_its_cure(
    tmp_path: Path, fault: str, reason: str
) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(f"gpus: [{{uuid: GPU-a, total: 4Gi, {fault}}}, {{uuid: GPU-b, total: 4Gi, ecc: 0}}]")
    mock = MockGpus(path, list)
    sick, well = await mock.read()
    assert sick.reason.startswith(reason)
    assert (sick.healthy, sick.broken, well.healthy, well.broken) == (False, True, True, False)
    path.write_text("gpus: [{uuid: GPU-a, total: 4Gi}]")
    assert [(one.healthy, one.broken) for one in await mock.read()] == [(True, False)]


BROKEN = GpuReading(A, 0, "T4", None, None, None, healthy=False, reason="XID 79", broken=True)


def test_a_models_gpu_is_in_trouble_where_it_is_broken_or_gone_and_not_where_nobody_can_tell() -> None:
    well, other = reading(GIB), replace(reading(GIB), uuid=GpuUuid("GPU-b"), index=1)
    unread = replace(BROKEN, broken=False, reason="NVML: Unknown Error")
    assert trouble_of([A], [well, other]) == ""
    assert trouble_of([A], [unread]) == ""
    assert trouble_of([], [BROKEN]) == ""
    assert trouble_of([A], [BROKEN, other]) == "GPU 0 (GPU-a): XID 79"
    assert trouble_of([GpuUuid("GPU-b"), A], [BROKEN, other]) == "GPU 0 (GPU-a): XID 79"
    assert trouble_of([A], [other]) == "GPU GPU-a is not on this node any more"
    assert trouble_of([A], [replace(BROKEN, uuid=nameless(0)), other]).endswith("not on this node any more")
    assert trouble_of([A], [replace(unread, uuid=nameless(0)), other]) == ""  # it may be that one


async def test_a_gpu_that_is_gone_is_told_as_broken_while_triton_holds_a_model_on_it() -> None:
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
    assert facts.have_turned()
    await facts.refresh()
    assert not facts.have_turned()
    driver.answer = (BROKEN,)
    await facts.refresh()
    assert facts.have_turned()
    driver.error = GpusUnknown("no driver")
    await facts.refresh()
    (still,) = facts.readings
    assert (still.broken, still.reason, facts.have_turned()) == (True, "XID 79", False)
    driver.error, driver.answer = None, (reading(GIB),)
    await facts.refresh()
    assert facts.have_turned()
    driver.error = GpusUnknown("no driver")
    await facts.refresh()
    (unknown,) = facts.readings
    assert (unknown.broken, unknown.reason, facts.have_turned()) == (False, "no driver", False)


B, C = GpuUuid("GPU-b"), GpuUuid("GPU-c")


@pytest.mark.parametrize(
    ("grown", "others", "told"),
    [
        ({A: 0, B: GIB}, {B}, B),
        ({A: 0, B: GIB, C: 2 * GIB}, {B, C}, C),
        ({A: 1, B: GIB}, {B}, None),  # it did grow
        ({A: 0, B: GIB - 1}, {B}, None),  # too little to be the model
        ({A: 0, B: GIB}, set(), None),  # another model may have come
        ({B: GIB}, {B}, None),  # the chosen one is not known
        ({A: -GIB, B: GIB}, {B}, B),
    ],
)
def test_the_gpu_that_a_load_went_to_instead(
    grown: dict[GpuUuid, int], others: set[GpuUuid], told: GpuUuid | None
) -> None:
    before = dict.fromkeys((A, B, C), 4 * GIB)
    after = {gpu: 4 * GIB + more for gpu, more in grown.items()}
    assert grown_instead(before, after, chosen=[A], others=others, least_bytes=GIB) == told
    assert (
        grown_instead(before, {A: 4 * GIB, B: 4 * GIB + 2**20}, chosen=[A], others={B}, least_bytes=0) is None
    )


async def test_trouble_with_the_gpus_is_said_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
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

    class Slow:
        instance_kind = "KIND_GPU"

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
    models, foreign, driver = holding(3 * GIB), OtherUse(), Driver()
    facts = GpuFacts(driver, lambda: models.residency)
    driver.answer = (replace(reading(4 * GIB), healthy=False, reason="ECC"),)

    def reported(*, busy: set[GpuUuid] | None = None) -> GpuReport:
        (only,) = gpu_reports(facts, models, foreign, busy=busy or set(), headroom_bytes=9)
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


def test_what_is_not_healthy_or_not_known_is_in_no_gauge() -> None:
    keys = Keys()
    ill = replace(reading(5), healthy=False)
    blind = replace(reading(None), utilization=None)
    busy = replace(reading(6), utilization=0.5)
    assert gauge_annotations([ill, blind], keys) == {keys.node_used: None, keys.node_util: None}
    assert gauge_annotations([ill, blind, busy, reading(1)], keys) == {
        keys.node_used: "7",
        keys.node_util: "0.25",
    }


def test_noise_is_no_model() -> None:
    before, noise = {A: 0, B: 0}, 64 * 1024**2
    for grown, told in ((noise - 1, None), (noise, B)):
        after = {A: 0, B: grown}
        assert grown_instead(before, after, chosen=[A], others=[B], least_bytes=0) == told


def test_cuda_goes_by_nvmls_order_where_no_bus_is_known() -> None:
    one, two = (replace(reading(0), uuid=uuid, index=index) for uuid, index in ((B, 1), (A, 0)))
    assert cuda_ordinals([one, two]) == {A: 0, B: 1}


async def test_without_gpus_there_is_nothing_to_read_and_nothing_to_pin() -> None:
    assert await NoGpus().read() == ()
    assert NoGpus().instance_kind == "KIND_CPU"
