"""What is told of a pod's model, and what its pod may ask for."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from agent.gpus import GpuReading, GpusUnknown
from agent.models import Model, Models
from agent.replicas import LimitsFile, Replicas, read_limits
from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits, ReplicaSpec, public_name_of, server_name_of, ticket_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid, ServerName
from berth.contract.keys import Keys
from berth.contract.pod import parse_model_pod
from berth.contract.report import ModelState
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.objects import pod

GPU = GpuChoice(GpuUuid("GPU-a"), 0, 5)
WHOLE = GpuReading(GpuUuid("GPU-a"), 0, "T4", 16, 0, 0.0)


class Table:
    def __init__(self) -> None:
        self.models, self.readings = Models(), [WHOLE]
        self.replicas = Replicas(self.models, b"secret", self.read, {})

    def read(self) -> tuple[GpuReading, ...]:
        if not self.readings:
            raise GpusUnknown("no driver")
        return tuple(self.readings)

    def see(self, uid: str, state: ModelState = ModelState.READY) -> Model:
        self.models.see_pod(parse_model_pod(pod(uid, on="n1", choice=GPU), Keys()))
        model = self.models.get(PodUid(uid))
        assert model is not None
        self.models.set(model, state)
        return model

    def withheld(self) -> dict[str, str | None]:
        return {replica.pod_uid: replica.withheld for replica in self.replicas.current()}


def test_each_pods_model_is_reported_under_both_its_names() -> None:
    table = Table()
    table.see("p1")
    table.models.see_pod(
        parse_model_pod(pod("p2", annotations={Keys().model_id: None}), Keys())
    )  # no name yet
    assert table.replicas.current() == (
        ReplicaSpec(
            ticket=ticket_of(b"secret", "p1"),
            namespace="team",
            pod="p1",
            pod_uid="p1",
            model="model-p1",
            server_name=server_name_of("model-p1", "p1"),
            loaded=True,
        ),
    )


@pytest.mark.parametrize(("state", "loaded"), [(state, state is ModelState.READY) for state in ModelState])
def test_what_is_loaded_is_told_so_that_triton_is_asked_at_once(state: ModelState, loaded: bool) -> None:
    table = Table()
    table.see("p1", state)
    (replica,) = table.replicas.current()
    assert replica.loaded is loaded
    assert ReplicaSpec.from_json(replica.to_json()) == replica
    told = replica.to_json()
    del told["loaded"]  # as an older agent
    assert ReplicaSpec.from_json(told).loaded is False


def test_a_replica_goes_with_its_pod_and_what_triton_holds_of_it_is_nobodys_to_use() -> None:
    table = Table()
    for uid in ("p1", "p2"):
        table.models.set_resident(table.see(uid), True)
    table.models.lose_pod(PodUid("p1"))
    assert table.withheld() == {"p1": "the model's pod has ended", "p2": None}
    assert [replica.pod_uid for replica in table.replicas.current([PodUid("p1")])] == [
        "p2"
    ]  # as soon as it is drained
    gone = table.models.get(PodUid("p1"))
    assert gone is not None
    table.models.set_resident(gone, False)
    assert table.withheld() == {"p2": None}


def test_a_pod_that_is_being_deleted_serves_until_its_end() -> None:
    table = Table()
    table.see("p1").deleting = True
    assert table.withheld() == {"p1": None}


@pytest.mark.parametrize("state", list(ModelState))
def test_what_has_failed_is_withheld_with_the_reason_whatever_triton_says(state: ModelState) -> None:
    table = Table()
    table.models.set(table.see("p1"), state, "x" * 2000)
    assert table.withheld() == {"p1": "x" * 512 if state is ModelState.FAILED else None}


def test_what_serves_on_a_broken_gpu_is_withheld_while_it_is() -> None:
    table = Table()
    table.see("p1")
    table.readings = [replace(WHOLE, broken=True, reason="XID 79")]
    assert table.withheld() == {"p1": "GPU 0 (GPU-a): XID 79"}
    table.readings = [replace(WHOLE, broken=True, reason="x" * 2000)]
    assert len(table.withheld()["p1"] or "") == 512
    table.readings = []  # nobody can tell
    assert table.withheld() == {"p1": None}


def test_limits_are_those_told_last_and_end_with_their_pod(tmp_path: Path) -> None:
    table, file = Table(), LimitsFile(tmp_path)
    table.see("p1")
    asked = ReplicaLimits(container_concurrency=2, queue_depth=0, request_timeout_seconds=1.5)
    assert table.replicas.set_limits(PodUid("p1"), asked)
    assert not table.replicas.set_limits(PodUid("p1"), asked)
    table.replicas.set_limits(PodUid("gone"), asked)
    assert table.replicas.current()[0].limits == asked
    file.write(table.replicas.limits().items())
    assert file.read() == {"p1": asked}
    again = Replicas(table.models, b"secret", table.read, file.read())  # an agent that has started anew
    assert again.current() == table.replicas.current()
    assert not again.set_limits(PodUid("p1"), asked)


@pytest.mark.parametrize("text", ["", "[]", '{"p1": 5}', '{"p1": {}}', "\udcff", "{" * 9999])
def test_limits_that_cannot_be_read_are_reported_anew_by_the_proxies(tmp_path: Path, text: str) -> None:
    assert LimitsFile(tmp_path).read() == {}
    (tmp_path / "limits.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert LimitsFile(tmp_path).read() == {}
    LimitsFile(tmp_path).write([(PodUid("p"), ReplicaLimits())])
    assert stat.S_ISREG((tmp_path / "limits.json").stat().st_mode)
    assert LimitsFile(tmp_path).read() == {"p": ReplicaLimits()}


def test_what_a_proxy_leaves_out_is_the_usual() -> None:
    assert read_limits(pb.ReplicaLimits()) == ReplicaLimits()
    given = pb.ReplicaLimits(
        container_concurrency=1,
        queue_depth=0,
        request_timeout_seconds=2.0,
        max_json_bytes=3,
        max_request_bytes=4,
    )
    assert read_limits(given) == ReplicaLimits(
        container_concurrency=1,
        queue_depth=0,
        request_timeout_seconds=2.0,
        max_json_bytes=3,
        max_request_bytes=4,
    )


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidValue, match=r"limits\.request_timeout_seconds is"):
        read_limits(pb.ReplicaLimits(request_timeout_seconds=seconds))


@pytest.mark.parametrize("name", ["m", "a-0123456789ab", "x.y_z", "m" * 128])
def test_people_see_the_name_that_the_server_does_not(name: str) -> None:
    on_server = server_name_of(name, "uid")
    assert on_server != server_name_of(name, "another") != name
    assert public_name_of(on_server) == ModelName(name)


@pytest.mark.parametrize("name", ["old", "-0123456789ab", "x-0123456789aB", "x-0123456789abc", ""])
def test_a_name_that_nobody_made_for_the_server_is_as_good_as_any(name: str) -> None:
    assert public_name_of(ServerName(name)) == name
