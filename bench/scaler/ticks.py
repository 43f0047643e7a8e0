"""What a whole scaler's heart costs: reports of all replicas, a second's load, a decision for each model and what comes of it."""

import time
from random import Random
from typing import NamedTuple

from berth.contract.scaling import ModelKey, ReplicaLoad
from berth.runtime.process import spare_the_collector
from scaler.core.cache import Cache
from scaler.core.scaler import Scaler
from scaler.decision.annotations import GROUP
from scaler.decision.defaults import BERTH, KPA, read_defaults

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND


class Cost(NamedTuple):
    """CPU seconds per second of a leader's life."""

    hearing: float
    seconds: float
    steps: float


def cost(models: int, replicas: int, seconds: int) -> Cost:
    """So many models with so many ready replicas each, under a load that changes all the time."""
    chance = Random(1)
    cache = Cache(read_defaults(BERTH))
    keys = [ModelKey(f"n{number % 20}", f"m{number}") for number in range(models)]
    pods: list[tuple[ModelKey, str]] = []
    for key in keys:
        cache.observe_deployment(_deployment(key, replicas))
        for place in range(replicas):
            pods.append((key, f"{key}-{place}"))
            cache.observe_pod(_pod(key, pods[-1][1]), BEGAN)
    scaler = Scaler(cache, BEGAN)
    spare_the_collector()  # as the scaler's own process does; else it is chance in which part it collects
    uids = {uid for _, uid in pods}
    hearing = closing = stepping = 0.0
    for second in range(1, seconds + 1):
        now_ns = BEGAN + second * SECOND
        loads = [_load(key, uid, second, chance) for key, uid in pods]
        begun = time.process_time()
        scaler.record_loads(loads, uids, now_ns)
        read = time.process_time()
        scaler.close_second(now_ns)
        closed = time.process_time()
        if second % 2 == 0:
            scaler.step(now_ns)
            scaler.question(now_ns)
        hearing += read - begun
        closing += closed - read
        stepping += time.process_time() - closed
    return Cost(hearing / seconds, closing / seconds, stepping / seconds)


def _load(key: ModelKey, uid: str, second: int, chance: Random) -> ReplicaLoad:
    busy = chance.uniform(0, 100)
    return ReplicaLoad(
        namespace=key.namespace,
        pod_name=uid,
        pod_uid=uid,
        second=second,
        average_concurrent_requests=busy,
        request_count=busy * 10,
        in_triton=int(busy),
        last_arrival=BEGAN // SECOND + second,
        timestamp=BEGAN // SECOND + second,
    )


def _deployment(key: ModelKey, replicas: int) -> dict[str, object]:
    proxy = {"args": ["proxy", f"--model={key.name}"]}
    return {
        "metadata": {
            "namespace": key.namespace,
            "name": key.name,
            "uid": str(key),
            "annotations": {GROUP + "class": KPA, GROUP + "target": "70"},
        },
        "spec": {
            "replicas": replicas,
            "template": {"metadata": {"labels": {"app": key.name}}, "spec": {"containers": [proxy]}},
        },
    }


def _pod(key: ModelKey, uid: str) -> dict[str, object]:
    owner = {"kind": "ReplicaSet", "name": f"{key.name}-5f", "controller": True}
    return {
        "metadata": {
            "namespace": key.namespace,
            "name": uid,
            "uid": uid,
            "labels": {"pod-template-hash": "5f"},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": "n"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
