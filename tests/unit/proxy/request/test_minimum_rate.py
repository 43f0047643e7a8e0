"""How slowly a request may come while others wait for what it has."""

from proxy.request.minimum_rate import BYTES_PER_SECOND, PATIENCE_SECONDS, MinimumRate


def test_what_came_early_buys_no_more_than_the_patience_there_is() -> None:
    """Or a client that sends 64 MiB at once could stall for minutes while others wait for its memory."""
    pace, sent_bytes = MinimumRate(0, 100.0), 64 * 1024**2
    assert not pace.is_too_slow(sent_bytes, 101.0, others_wait=True)
    assert not pace.is_too_slow(sent_bytes, 101.0 + PATIENCE_SECONDS, others_wait=True)
    assert pace.is_too_slow(sent_bytes, 101.1 + PATIENCE_SECONDS, others_wait=True)


def test_who_keeps_the_pace_is_never_too_slow_and_time_counts_only_while_others_wait() -> None:
    pace = MinimumRate(0, 100.0)
    for second in range(1, 1000):
        assert not pace.is_too_slow(second * BYTES_PER_SECOND, 100.0 + second, others_wait=True)
    sent_bytes = 999 * BYTES_PER_SECOND
    assert not pace.is_too_slow(sent_bytes, 5000.0, others_wait=False)
    assert not pace.is_too_slow(sent_bytes, 5000.0 + PATIENCE_SECONDS, others_wait=True)
    assert pace.is_too_slow(sent_bytes, 5000.1 + PATIENCE_SECONDS, others_wait=True)
