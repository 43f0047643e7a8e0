"""Which replicas there are, and what they may take at most."""

from typing import Any

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits
from proxy.gateway.registry import Ceilings, Registry, read_replicas
from tests.fakes.agent_control import replica_of

CEILINGS = Ceilings(
    request_timeout_seconds=100, max_json_bytes=10, max_request_bytes=20, max_inflight_bytes=40
)


@pytest.mark.parametrize(
    ("asked", "whole", "json"),
    [
        (
            {},
            "--max-request-bytes, bounded by --most-request-bytes of the node's gateway",
            "--max-json-bytes",
        ),
        ({"max_request_bytes": 19, "max_json_bytes": 9}, "--max-request-bytes", "--max-json-bytes"),
        (
            {"max_request_bytes": 19, "max_json_bytes": 11},
            "--max-request-bytes",
            "--max-json-bytes, bounded by --most-json-bytes of the node's gateway",
        ),
        ({"max_request_bytes": 7}, "--max-request-bytes", "--max-request-bytes"),
        ({"max_inflight_bytes": 8}, *2 * ("--most-inflight-bytes of the node's gateway",)),
    ],
)
def test_who_is_refused_is_told_what_its_operator_can_change(
    asked: dict[str, int], whole: str, json: str
) -> None:
    """A pod that requests more than a ceiling gets no more by asking again."""
    limits = CEILINGS.capped(ReplicaLimits(**{"max_json_bytes": 9, **asked}))
    flags = CEILINGS.flags(limits)
    assert (flags.request, flags.json) == (whole, json)
    assert flags.inflight == "--most-inflight-bytes of the node's gateway"


def test_new_changed_ended() -> None:
    registry = Registry()
    a, b = replica_of("a"), replica_of("b")
    assert registry.apply([a, b]).new == (a, b)
    other = replica_of("b", limits=ReplicaLimits(container_concurrency=1))
    changes = registry.apply([a, other])
    assert (changes.new, changes.changed, changes.ended) == ((), (other,), ())
    # The same pod with another name on the server is another replica: the old one's connections end.
    moved = replica_of("b", server_name="simple-of-b-anew")
    changes = registry.apply([moved])
    assert (changes.new, changes.ended) == ((moved,), (a, other))
    # So is one with another ticket, as when the node's secret was made anew: the old one opens nothing more.
    anew = replica_of("b", server_name="simple-of-b-anew", ticket=bytes(32))
    changes = registry.apply([anew])
    assert (changes.new, changes.ended) == ((anew,), (moved,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"podUid": ""},
        {"serverName": "s"},
        {"ticket": "zz"},
        {"withheld": 5},
        {"limits": {}},
        {"limits": {**replica_of("a").to_json()["limits"], "containerConcurrency": -1}},
        {"limits": {**replica_of("a").to_json()["limits"], "requestTimeoutSeconds": 0}},
        {"limits": {**replica_of("a").to_json()["limits"], "requestTimeoutSeconds": float("nan")}},
        {"limits": {**replica_of("a").to_json()["limits"], "maxJsonBytes": 0}},
    ],
)
def test_replicas_that_cannot_be(wrong: dict[str, Any]) -> None:
    good = replica_of("a").to_json()
    assert read_replicas([good]) == (replica_of("a"),)
    with pytest.raises(InvalidValue):
        read_replicas([replica_of("b").to_json(), {**good, **wrong}])
