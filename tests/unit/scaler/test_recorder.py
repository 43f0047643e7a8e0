"""What is written down of the decisions, and what they are when they are made again."""

import json
from pathlib import Path
from random import Random

import pytest

from berth.contract.scaling import ModelKey
from scaler.decision.annotations import GROUP
from scaler.decision.decider import Decision, ModelDecider
from scaler.decision.defaults import BERTH, read_defaults
from scaler.decision.load import Stat
from scaler.decision.replay import Json, Replay, answer_of
from scaler.recorder import Recorder
from tests.fakes.scaled_cluster import Cluster

KEY = ModelKey("a", "m")


def test_a_record_makes_the_same_decisions_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster with all that can happen to a model: clips, other annotations and defaults, sleep, a restart of its scaler."""
    made: list[Json] = []
    decide = ModelDecider.decide

    def noted(model: ModelDecider, *, ready: int, now_ns: int) -> Decision | None:
        decision = decide(model, ready=ready, now_ns=now_ns)
        made.append(answer_of(decision, in_panic=model.in_panic))
        return decision

    monkeypatch.setattr(ModelDecider, "decide", noted)
    path, chance = tmp_path / "record", Random("record")
    recorder = Recorder(path, BERTH)
    cluster = Cluster(places=6, record=recorder)
    models = [cluster.add(name, concurrency=2, target=chance.choice(["1", "2"])) for name in ("a", "b", "c")]
    for second in range(600):
        if chance.random() < 0.1:
            chance.choice(models).load = chance.choice([0, 0, 1, 3, 9])
        if second == 200:
            models[0].annotations[GROUP + "window"] = "20s"
            models[1].annotations[GROUP + "scale-down-delay"] = "30s"
            models[2].annotations[GROUP + "metric-aggregation-algorithm"] = "weighted-exponential"
            for model in models:
                cluster.change(model)
        if second == 300:
            cluster.config = {
                **BERTH,
                "container-concurrency-target-percentage": "50",
                "stable-window": "40s",
            }
            recorder.configured(cluster.config)
            cluster.cache.configure(read_defaults(cluster.config))
        if second == 400:
            cluster.restart()
        cluster.now += chance.random() < 0.05
        cluster.second()
    recorder.close()
    monkeypatch.undo()
    core = Replay()
    answers = [core.answer(line) for line in path.read_text().splitlines()]
    assert [answer for answer in answers if answer is not None and "valid" in answer] == made
    assert sum(answer["valid"] for answer in made) > 500


def test_it_ends_where_it_may_not_grow_and_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "record"
    recorder = Recorder(path, {}, most_bytes=1000)
    for second in range(100):
        recorder.stat(KEY, second * 10**9, Stat(concurrency=1.0))
    recorder.close()
    assert path.stat().st_size <= 1000
    for line in path.read_text().splitlines():
        json.loads(line)


def test_who_is_killed_has_written_what_was_decided(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "record", {})
    recorder.gone(KEY)
    assert json.loads((tmp_path / "record").read_text()) == {"op": "del", "id": "a/m"}
    recorder.close()


def test_the_record_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("before\n")
    recorder = Recorder(path, {})
    recorder.gone(KEY)
    recorder.close()
    assert path.with_name("record.1").read_text() == "before\n"
    assert json.loads(path.read_text()) == {"op": "del", "id": "a/m"}


def test_a_disk_that_takes_no_more_ends_it_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Path("/dev/full"), {})
    for second in range(10_000):
        recorder.scale(KEY, second * 10**9, ready=1)
    recorder.close()
    assert [record.message for record in caplog.records] == ["the record of decisions ends"]
