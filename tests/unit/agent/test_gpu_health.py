"""Which of NVML's facts break a GPU."""

import pytest

from agent.gpu_health import CRITICAL_XIDS, Health


@pytest.mark.parametrize(
    ("health", "fault"),
    [
        (Health(), ""),
        (Health(ecc_errors=0), ""),
        (
            Health(ecc_errors=3),
            "ECC: 3 uncorrected memory errors since its last reset: the GPU must be reset",
        ),
        (Health(xid=79), "XID 79 (GPU has fallen off the bus): the GPU must be reset"),
        (Health(xid=999), "XID 999: the GPU must be reset"),
        (Health(remap_failed=True), "RowRemapFailure: a bad row of its memory could not be replaced"),
        (Health(remap_pending=True), "RowRemapPending: a bad row of its memory is replaced"),
        (Health(retirement_pending=True), "PageRetirementPending: a bad page of its memory is retired"),
        # The gravest first.
        (Health(xid=48, remap_failed=True, ecc_errors=1), "XID 48"),
        (Health(remap_failed=True, ecc_errors=1, remap_pending=True), "RowRemapFailure"),
        (Health(ecc_errors=1, remap_pending=True), "ECC"),
        (Health(remap_pending=True, retirement_pending=True), "RowRemapPending"),
    ],
)
def test_the_fault_and_its_cure(health: Health, fault: str) -> None:
    assert health.fault.startswith(fault) if fault else health.fault == ""


def test_what_an_application_can_cause_is_not_critical() -> None:
    assert not {8, 11, 13, 31, 32, 43, 45, 63, 68, 92, 109, 121}.intersection(CRITICAL_XIDS)
