"""The scaler's metrics."""

from prometheus_client import CollectorRegistry, generate_latest

from scaler.activation.control_server import ControlStats
from scaler.activation.sessions import Connected
from scaler.core.models_view import Averages
from scaler.metrics import ScalerMetrics
from tests.fakes.control_server import FakeControlServer
from tests.fakes.models_view import FakeModels


def test_metrics_tell_of_each_model_and_nothing_of_what_is_unknown() -> None:
    models, registry = FakeModels(), CollectorRegistry()
    models.add(
        "team/a",
        ready=2,
        desired=5,
        capacity_limited=3,
        buffered=7,
        in_panic=True,
        concurrency=Averages(1.5, None),
        requests_per_second=Averages(),
    )
    control_server = FakeControlServer(
        [Connected("berth-system/act-1", 12.5, 3), Connected("a/own", 1.0, 0)],
        ControlStats(reports=9, rejected=2, throttled=1),
    )
    ScalerMetrics(registry).follow(
        models, writes_waiting=lambda: 4, binder_silent_seconds=lambda: 1.5, control_server=control_server
    )
    text = generate_latest(registry).decode()
    assert "berth_scaler_activators 2.0" in text
    assert 'berth_scaler_activator_session_seconds{activator="berth-system/act-1"} 12.5' in text
    assert 'berth_scaler_activator_buffered_requests{activator="berth-system/act-1"} 3.0' in text
    for name, count in {"reports": 9, "rejected_reports": 2, "throttled_reports": 1}.items():
        assert f"berth_scaler_{name}_total {count}.0" in text
    labels = '{deployment="a",namespace="team"}'
    for name, value in {"desired": 5, "ready": 2, "capacity_limited": 3}.items():
        assert f"berth_scaler_{name}_replicas{labels} {value}.0" in text
    assert f"berth_scaler_buffered_requests{labels} 7.0" in text
    assert f"berth_scaler_in_panic{labels} 1.0" in text
    assert f"berth_scaler_concurrency{labels} 1.5" in text
    assert f"berth_scaler_requests{labels}" not in text
    assert "berth_scaler_writes_waiting 4.0" in text
    assert 'berth_scaler_writes_total{result="refused",what="slice"} 0.0' in text
