"""Times in the API."""

from datetime import UTC, datetime, timedelta, timezone

from berth.kube.times import micro_time, parse_time, rfc3339, utc_now


def test_times_are_in_utc_whatever_the_zone() -> None:
    noon = datetime(2026, 7, 1, 12, 0, 0, 120, timezone(timedelta(hours=2)))
    assert micro_time(noon) == "2026-07-01T10:00:00.000120Z"
    assert rfc3339(noon) == "2026-07-01T10:00:00Z"
    assert parse_time(micro_time(noon)) == noon
    assert parse_time("2026-07-01T10:00:00Z") == noon.replace(microsecond=0)
    assert parse_time("soon") is None
    assert parse_time(None) is None
    assert abs(utc_now() - datetime.now(UTC)) < timedelta(seconds=10)
