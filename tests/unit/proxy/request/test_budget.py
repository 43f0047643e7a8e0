"""Parts of a whole: what one takes is never another's refusal."""

from proxy.request.budget import Budget


def test_who_is_charged_too_much_is_the_one_that_has_it() -> None:
    """What is there already (an answer that nobody reads) is charged unasked: it is its own copy that has to
    go, before it has all that there is, and no other one's answer is broken off for it."""
    whole = Budget(256)
    greedy, other = Budget(256, whole), Budget(256, whole)
    while not greedy.is_exceeded:
        greedy.charge(8)
    assert greedy.used_bytes <= 256 // 2 + 8
    assert other.take(32)
    other.charge(8)
    assert not other.is_exceeded


def test_what_is_alone_in_a_whole_has_its_own_limit() -> None:
    alone = Budget(64, Budget(256))
    alone.charge(64)
    assert not alone.is_exceeded
    alone.charge(1)
    assert alone.is_exceeded
