"""How often a pod is asked whether it serves."""

from collections.abc import Callable

from proxy.activator.bounds import ProbeLoad
from proxy.activator.probe_schedule import ProbeSchedule

PODS = 16


def probes_each_second(
    seconds: int, nearly_ready: Callable[[int], bool], *, pods: int = PODS, load: ProbeLoad | None = None
) -> list[int]:
    """Of pods that never serve, second by second: when each was probed, it waits for its pause."""
    load = load or ProbeLoad()
    schedules = [ProbeSchedule(load) for _ in range(pods)]
    counts = [0] * seconds
    for schedule in schedules:
        now = 0.0
        while now < seconds:
            counts[int(now)] += 1
            now += schedule.pause(is_open=False, nearly_ready=nearly_ready(int(now)))
    return counts


def test_a_pod_that_is_nearly_ready_is_probed_without_a_rest_for_a_while() -> None:
    """Clients that come and leave do not renew that: else one model would be probed a hundred times a second for ever."""
    counts = probes_each_second(120, lambda second: True)
    assert min(counts[1:3]) > PODS * 50
    assert max(counts[10:60]) <= PODS * 27
    assert max(counts[100:]) <= PODS * 8
    assert min(counts[100:]) >= PODS * 2


def test_a_pod_that_is_nearly_ready_only_now_is_probed_without_a_rest_then() -> None:
    """What comes before may take long; the moment after it is what requests wait for."""
    counts = probes_each_second(120, lambda second: second >= 90)
    assert max(counts[70:90]) <= PODS * 8
    assert max(counts[90:95]) > PODS * 50
    assert max(counts[105:]) <= PODS * 27


def test_a_pod_that_is_not_nearly_ready_is_in_no_hurry() -> None:
    assert max(probes_each_second(60, lambda second: False)) <= PODS * 27


def test_a_pod_that_has_served_is_in_no_hurry_again() -> None:
    """Readiness that comes and goes is its tenant's to make."""
    schedule = ProbeSchedule(ProbeLoad())
    schedule.changed(is_open=True, now=0.0)
    assert schedule.pause(is_open=True, nearly_ready=True) == 1.0
    schedule.changed(is_open=False, now=60.0)
    assert schedule.pause(is_open=False, nearly_ready=True) == 0.05


def test_however_many_pods_a_tenant_has_to_probe_them_costs_no_more() -> None:
    load = ProbeLoad()
    schedules = [ProbeSchedule(load) for _ in range(4 * PODS)]
    assert schedules[0].pause(is_open=False, nearly_ready=False) == 4 * 0.05
    for schedule in schedules[: 2 * PODS]:
        schedule.changed(is_open=True, now=0.0)
    for schedule in schedules[2 * PODS : 3 * PODS]:
        schedule.end()
        schedule.end()
    assert load.probed == PODS
    assert schedules[-1].pause(is_open=False, nearly_ready=False) == 0.05
    for schedule in schedules:
        schedule.end()
    assert load.probed == 0


def test_a_pod_that_stops_serving_again_and_again_is_left_alone_for_longer_each_time() -> None:
    schedule = ProbeSchedule(ProbeLoad())
    rests = []
    for n in range(8):
        schedule.changed(is_open=True, now=10.0 * n)
        assert schedule.take_rest() == 0.0
        schedule.changed(is_open=False, now=10.0 * n + 1)
        rests.append(schedule.take_rest())
        assert schedule.take_rest() == 0.0
    assert 0 < rests[0] <= 0.1
    assert rests[-1] > 10 * rests[0]
    assert max(rests) <= 2.5
    # One that has served for a while begins anew.
    schedule.changed(is_open=True, now=100.0)
    schedule.changed(is_open=False, now=105.0)
    assert schedule.take_rest() == 0.0
    schedule.changed(is_open=True, now=106.0)
    schedule.changed(is_open=False, now=107.0)
    assert schedule.take_rest() <= 0.1
