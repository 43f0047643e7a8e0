"""How much may be done by now, and what is paid back."""

from binder.loop.token_bucket import TokenBucket


def test_tokens_come_back_with_time_and_no_more_than_fit() -> None:
    now = [0.0]
    bucket = TokenBucket(per_second=2.0, most=10, clock=lambda: now[0])
    assert bucket.left() == 10
    bucket.spend(9)
    assert bucket.left() == 1
    now[0] = 0.4
    assert bucket.left() == 1
    now[0] = 0.5
    assert bucket.left() == 2
    bucket.spend(6)  # more than was left
    assert bucket.left() == 0
    now[0] = 2.0
    assert bucket.left() == 0
    now[0] = 2.5
    assert bucket.left() == 0
    now[0] = 3.0
    assert bucket.left() == 1
    now[0] = 3600.0
    assert bucket.left() == 10
