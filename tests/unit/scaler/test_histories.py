"""Whatever happens to it, the scaler's heart keeps what it promises."""

from random import Random

import pytest

from berth.contract.scaling import ModelKey
from scaler.core.actions import WriteScale
from scaler.decision.bounds import Activity
from tests.fakes.scaled_cluster import Cluster, FakeModel, FakePod, evenly

GRACE = 10
CONFIG = {"scale-to-zero-grace-period": f"{GRACE}s", "stable-window": "20s"}
SECONDS = 300
# Where somebody else has taken the place: until the next decision, and one for what came between.
MOST_PENDING = 5


class History:
    """A random one, of one seed. `calm`: nobody but the scaler changes anything."""

    def __init__(self, seed: str, *, calm: bool) -> None:
        self.chance, self.calm = Random(seed), calm
        self.cluster = Cluster(self.chance.randint(1, 12), config=CONFIG)
        self.cluster.on_write = self.check
        self.cluster.spread = self.spread
        # Replicas with a request that takes for ever, by their uids.
        self.long: set[str] = set()
        self.by_hand: ModelKey | None = None
        self.models = [self.model(number) for number in range(self.chance.randint(1, 4))]
        self.loads = {model.key: 0.0 for model in self.models}

    def model(self, number: int) -> FakeModel:
        chance, options = self.chance, {}
        if chance.random() < 0.3:
            options["scale_to_zero_pod_retention_period"] = chance.choice(["until-needed", "15s"])
        if chance.random() < 0.3:
            options["min_scale"] = "1"
        if chance.random() < 0.3:
            options["scale_down_delay"] = "10s"
        return self.cluster.add(
            f"m{number}",
            concurrency=chance.choice([0, 1, 4]),
            target=chance.choice(["1", "2", "5"]),
            priority=chance.choice([0, 0, 5]),
            load_seconds=chance.choice([1, 4, 15]),
            **options,
        )

    def spread(self, model: FakeModel, ready: list[FakePod]) -> None:
        for pod in ready:
            if pod.uid in self.long and self.chance.random() < 0.03:
                self.long.discard(pod.uid)
            pod.busy = self.chance.choice([0, 1, int(model.load)]) if model.load else 0
            pod.rate = pod.busy * 10.0
            if pod.busy and self.chance.random() < 0.02:
                self.long.add(pod.uid)
            if pod.uid in self.long:
                pod.busy, pod.rate = pod.busy + 1, 0.0

    def check(self, write: WriteScale) -> None:
        cluster, model = self.cluster, self.cluster.models[write.model]
        view, counts = cluster.view(model), cluster.cache.counts(write.model)
        assert write.replicas <= (view.desired or 0) or write.replicas < model.replicas
        if view.capacity_limited:
            assert write.replicas >= min(view.desired or 0, counts.bound), (
                "gave up replicas for want of room for more"
            )
        if write.replicas == 0:
            assert not any(pod.busy for pod in cluster.ready(model)), (
                "ended the last replicas while one was busy"
            )
            if counts.ready:
                since = cluster.proven_since[write.model]
                assert view.activity is Activity.INACTIVE
                assert cluster.ns - since >= GRACE * 10**9, "requests could still come"

    def check_pending(self) -> None:
        """While the binder or the API server does not answer nothing can be taken back, nor while nothing is known."""
        cluster = self.cluster
        for uid, pod in cluster.pods.items():
            if not (cluster.binder_answers and cluster.api_works and pod.refused):
                cluster.pending_seconds[uid] = 0
            if cluster.view(cluster.models[pod.model]).recommended is None:
                cluster.pending_seconds[uid] = 0
            seconds = cluster.pending_seconds.get(uid, 0)
            assert seconds < MOST_PENDING, f"{uid} was asked for and has no place"

    def happen(self) -> None:
        """Something, or nothing."""
        cluster, chance = self.cluster, self.chance
        model = chance.choice(self.models)
        if chance.random() < 0.1:
            model.load = chance.choice([0, 0, 0, 1, 3, 8, 20])
        if self.calm or chance.random() > 0.06:
            return
        match chance.randrange(7):
            case 0:
                cluster.binder_answers = not cluster.binder_answers
            case 1:
                cluster.api_works = not cluster.api_works
            case 2:
                cluster.restart()
            case 3:
                cluster.activators = 1 - cluster.activators
            case 4:
                cluster.taken_by_others = chance.randint(0, max(cluster.free, 0))
            case 5:
                model.replicas, self.by_hand = chance.randint(0, 5), model.key
                cluster.change(model)
            case 6:
                for pod in chance.sample(cluster.living(model), min(1, len(cluster.living(model)))):
                    cluster._end(pod)

    def run(self) -> None:
        for _ in range(SECONDS):
            self.by_hand = None
            self.happen()
            long = set(self.long)
            self.cluster.cut.clear()
            self.cluster.second()
            for pod in self.cluster.cut:
                assert pod.uid not in long or pod.model == self.by_hand, "ended a replica with a long request"
            self.check_pending()
            if self.calm:
                assert not any(pod.refused for pod in self.cluster.pods.values()), (
                    "asked for what has no place"
                )


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_requested_that_has_no_place(seed: int) -> None:
    history = History(f"calm {seed}", calm=True)
    history.run()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_busy_replica_ends(seed: int) -> None:
    history = History(f"wild {seed}", calm=False)
    history.run()


@pytest.mark.parametrize("seed", range(4))
def test_when_all_is_well_again_everybody_gets_what_there_is_and_nobody_more(seed: int) -> None:
    history = History(f"well {seed}", calm=False)
    history.run()
    cluster = history.cluster
    cluster.binder_answers = cluster.api_works = True
    cluster.activators, cluster.taken_by_others = 1, 0
    cluster.spread, history.calm = evenly, True
    history.long.clear()
    for model in history.models:
        model.load = history.chance.choice([1, 1, 3, 8])
    cluster.run(90)
    lacking = [model for model in history.models if cluster.view(model).capacity_limited]
    assert not lacking or cluster.free == 0, "there is room, and somebody waits for it"
    for model in history.models:
        assert model.reserved == 0 or cluster.free == 0, "held, though there is room"
        assert len(cluster.ready(model)) == len(cluster.of(model)) == model.replicas
    before = [list(model.written) for model in history.models]
    cluster.run(20)
    assert [model.written for model in history.models] == before, "it does not come to rest"
    for model in history.models:
        model.load = 0
    cluster.run(120)
    for model in history.models:
        least = int(model.annotations.get("autoscaling.knative.dev/min-scale", "0"))
        kept = "until-needed" in model.annotations.values()
        has_no_place = cluster.view(model).capacity_limited and not cluster.free
        assert has_no_place or len(cluster.ready(model)) in ({0, 1} if kept else {least})
        assert model.reserved == 0
