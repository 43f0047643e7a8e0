"""Kubernetes' time formats."""

from datetime import UTC, datetime


def micro_time(now: datetime) -> str:
    """metav1.MicroTime: RFC 3339, UTC, six decimals."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def rfc3339(now: datetime) -> str:
    """metav1.Time: RFC 3339, UTC, whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """Read either form; None where there is no readable time."""
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None


def utc_now() -> datetime:
    return datetime.now(UTC)
