"""Mock GPUs follow their scenario."""

from pathlib import Path

import pytest

from agent.gpus import (
    GpusUnknown,
    cuda_ordinals,
)
from agent.mock_gpus import MockGpus, Resident, parse_scenario
from berth.contract.errors import InvalidValue
from berth.contract.ids import GpuUuid, ModelName
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
            r"gpus\[0\].totl is not a field; known are ecc, error, lost, mig, other_use",
        ),
        ("gpus: [{uuid: a, total: 1, lost: maybe}]", r"gpus\[0\].lost is 'maybe'"),
        ("gpus: [{uuid: a, total: 1, utilization: 7}]", "utilization is 7"),
        ("gpus: [{uuid: a, total: 1, utilization: -0.1}]", "utilization is -0.1; 0 to 1"),
        ("gpus: [{uuid: a, total: 1, utilization: high}]", "utilization is 'high'; 0 to 1"),
        ("gpus: [{uuid: a, total: 1, mig: 1}]", r"gpus\[0\].mig is 1; true or false"),
        ("gpus: [{uuid: a, total: 1, xid: many}]", r"gpus\[0\].xid is 'many'; a whole number"),
        ("gpus: [{uuid: a, total: 1, ecc: -1}]", r"gpus\[0\].ecc is -1"),
        ("gpus: [{uuid: a, total: 1, remap: soon}]", r"gpus\[0\].remap is 'soon'; pending or failed"),
        ("gpus: [{uuid: a, total: 1, other_use: x}]", r"gpus\[0\].other_use: 'x'"),
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
    path, loaded = (
        tmp_path / "gpus.yaml",
        [Resident(ModelName("resnet"), A, 5), Resident(ModelName("x"), A, 2 * GIB)],
    )
    path.write_text(SCENARIO)
    mock = MockGpus(path, lambda: loaded)
    a, b, c, d = await mock.read()
    assert (a.total_bytes, a.used_bytes, a.utilization, a.healthy) == (24 * GIB, 13 * GIB, 0.25, True)
    assert (b.healthy, b.reason, b.used_bytes) == (False, "ECC", 0)
    assert (c.healthy, c.total_bytes, c.used_bytes) == (False, None, None)
    assert (d.healthy, d.reason) == (False, "MIGEnabled")
    assert cuda_ordinals([a, b, c, d]) == {"GPU-a": 0, "GPU-b": 1}
    loaded.clear()
    path.write_text(SCENARIO.replace("other_use: 1Gi", "other_use: 3Gi"))
    assert (await mock.read())[0].used_bytes == 3 * GIB


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
