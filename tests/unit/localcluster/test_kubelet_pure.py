from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from berth.kube.errors import NotFound
from localcluster.kubelet.backoff import CrashBackoff
from localcluster.kubelet.container import Launch
from localcluster.kubelet.environment import Addresses, environment_of
from localcluster.kubelet.expansion import expand
from localcluster.kubelet.images import Image, Images
from localcluster.kubelet.probes import Verdict
from localcluster.kubelet.refusal import CannotRun, check, entrypoint_of
from localcluster.kubelet.rewriting import own_loopback, rewrite, service_names
from localcluster.kubelet.status import (
    ContainerRecord,
    Running,
    Terminated,
    phase_of,
    pod_status,
    with_transitions,
)
from localcluster.kubelet.volumes import Volumes

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IMAGES = Images({"berth": Image(entrypoint=("true",))})


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y$(A)"),  # values are not expanded again
        ("$(NONE)", "$(NONE)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("$$", "$"),
    ],
)
def test_expansion_by_kubernetes_rules(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "$(A)"}) == expanded


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/data", "/v/1"),
        ("--file=/data/x", "--file=/v/1/x"),
        ("/data/sub/x", "/v/2/x"),
        ("/database", "/database"),
        ("/my/data", "/my/data"),
        ("a:/data:/data/y", "a:/v/1:/v/1/y"),
        ("cat '/data' > /data", "cat '/v/1' > /v/1"),
        ("$(cat /data/sub)", "$(cat /v/2)"),
    ],
)
def test_a_mount_path_becomes_its_directory(text: str, rewritten: str) -> None:
    assert rewrite(text, {"/data": "/v/1", "/data/sub": "/v/2"}) == rewritten


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("--triton-http=127.0.0.1:8000", "--triton-http=127.20.1.5:8000"),
        (
            "curl -s http://127.0.0.1:8000/v2 && echo 127.0.0.1",
            "curl -s http://127.20.1.5:8000/v2 && echo 127.20.1.5",
        ),
        ("127.0.0.1.", "127.20.1.5."),
        ("127.0.0.10:1, 127.0.0.1.example.com, x127.0.0.1, 1.127.0.0.1", None),
        ("localhost:80", None),
    ],
)
def test_a_pods_loopback_is_its_own_address(text: str, meant: str | None) -> None:
    assert own_loopback(text, "127.20.1.5") == (meant or text)


def pod(**container: Any) -> dict[str, Any]:
    meta = {"name": "p", "namespace": "n", "uid": "u", "labels": {"app": "x"}, "annotations": {}}
    return {
        "metadata": meta,
        "spec": {"nodeName": "node", "containers": [{"name": "c", "image": "berth", **container}]},
    }


def variable(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("--scaler=berth-scaler.berth-system.svc:9093", "--scaler=127.20.255.9:9093"),
        ("--scaler=berth-scaler.berth-system:9093", "--scaler=127.20.255.9:9093"),
        ("http://berth-scaler.berth-system.svc.cluster.local/x", "http://127.20.255.9/x"),
        ("berth-scaler.berth-system.svc.example.com", None),
        ("not.berth-scaler.berth-system.svc", None),
        ("berth-scaler.elsewhere.svc:9093", None),
    ],
)
def test_a_services_name_becomes_its_address(text: str, meant: str | None) -> None:
    known = {("berth-system", "berth-scaler"): "127.20.255.9"}
    assert service_names(text, lambda namespace, name: known[namespace, name]) == (meant or text)


def test_environment_in_its_order() -> None:
    env = [
        variable("IP", "status.podIP"),
        {"name": "URL", "value": "http://$(IP):80/$(LATER)"},
        {"name": "LATER", "value": "no"},
        variable("APP", "metadata.labels['app']"),
        variable("NONE", "metadata.annotations['none']"),
    ]
    one = pod(env=env)
    found = environment_of(one, one["spec"]["containers"][0], Addresses("127.20.1.2", "127.20.1.1"))
    assert found == {
        "IP": "127.20.1.2",
        "URL": "http://127.20.1.2:80/$(LATER)",
        "LATER": "no",
        "APP": "x",
        "NONE": "",
    }


@pytest.mark.parametrize(
    ("container", "spec", "message"),
    [
        ({"image": "nginx:1"}, {}, "image 'nginx:1' cannot be pulled here"),
        ({"command": ["no-such-program-here"]}, {}, "no program 'no-such-program-here'"),
        ({"envFrom": [{}]}, {}, "envFrom is not supported"),
        ({"lifecycle": {"postStart": {"exec": {}}}}, {}, "postStart is not supported"),
        (
            {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {}}}]},
            {},
            "env X: secretKeyRef is not supported",
        ),
        (
            {},
            {"volumes": [{"name": "v", "persistentVolumeClaim": {}}]},
            "persistentVolumeClaim cannot be mounted",
        ),
        ({}, {"volumes": [{"name": "v", "projected": {"sources": [{"secret": {}}]}}]}, "projected secret"),
        ({}, {"activeDeadlineSeconds": 1}, "spec.activeDeadlineSeconds is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    container: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    one = pod(**container)
    one["spec"].update(spec)
    with pytest.raises(CannotRun, match=message):
        check(one, IMAGES)


def test_the_own_image_has_an_entrypoint_wherever_it_is_from() -> None:
    for image in ("berth", "berth:1", "registry:5000/team/berth:0.1", "x/berth@sha256:00"):
        assert entrypoint_of({"name": "c", "image": image}, IMAGES.of(image)) == ("true",)
        assert entrypoint_of({"name": "c", "image": image, "command": ["sh"]}, IMAGES.of(image)) == ("sh",)


def test_a_verdict_changes_after_enough_outcomes_in_a_row() -> None:
    verdict = Verdict(success_threshold=2, failure_threshold=3, passed=False)
    outcomes = [True, False, True, True, False, False, True, False, False, False]
    assert [(verdict.take(o), verdict.passed)[1] for o in outcomes] == [False] * 3 + [True] * 6 + [False]


def record(name: str, **more: Any) -> ContainerRecord:
    return ContainerRecord(name, "berth", **more)


def ended(code: int) -> Terminated:
    return Terminated(code, NOW, NOW)


def test_phases() -> None:
    init, main = record("i", is_init=True), record("m")
    assert phase_of([init, main]) == "Pending"
    init.state, init.ended = ended(0), True
    main.state = Running(NOW)
    assert phase_of([init, main]) == "Running"
    main.state, main.ended = ended(0), True
    assert phase_of([init, main]) == "Succeeded"
    main.state = ended(1)
    assert phase_of([init, main]) == "Failed"
    init.state = ended(1)
    assert phase_of([init, record("m")]) == "Failed"


def test_a_pod_is_ready_with_its_containers_and_not_while_it_ends() -> None:
    main = record("m", state=Running(NOW), ready=True, started=True)

    def ready(*, deleting: bool) -> str:
        status = pod_status([main], pod_ip="1", host_ip="2", started=NOW, deleting=deleting)
        return str({c["type"]: c["status"] for c in status["conditions"]}["Ready"])

    assert (ready(deleting=False), ready(deleting=True)) == ("True", "False")
    main.ready = False
    assert ready(deleting=False) == "False"


def launch(spec: dict[str, Any], image: Image, mounts: dict[str, str]) -> Launch:
    return Launch(
        spec={"name": "c", "image": "i", **spec},
        image=image,
        env={"IP": "127.20.1.2", "HOME": "/tmp"},
        base_env={"MARK": "m"},
        mounts=mounts,
        directory=Path("/containers/c"),
        pod_ip="127.20.1.2",
        grace_seconds=30,
    )


def test_a_container_gets_its_images_programs_and_the_places_of_its_mounts() -> None:
    image = Image(
        ("berth",), programs=Path("/images/berth"), environment={"A": "$(POD_IP):1", "B": "/tmp/own"}
    )
    mounts = {"/tmp": "/v/tmp", "/var/run/secrets/kubernetes.io/serviceaccount": "/v/account"}
    one = launch({"args": ["--listen=[$(IP)]:1", "--file=/tmp/x"]}, image, mounts)
    assert one.command() == ["berth", "--listen=[127.20.1.2]:1", "--file=/v/tmp/x"]
    found = one.environment()
    assert found.pop("PATH").startswith("/images/berth:")
    assert found == {
        "MARK": "m",
        "IP": "127.20.1.2",
        "HOME": "/v/tmp",
        "A": "127.20.1.2:1",
        "B": "/tmp/own",  # an image's paths are this machine's
        "TMPDIR": "/v/tmp",
        "BERTH_LOCALCLUSTER_SERVICE_ACCOUNT": "/v/account",
    }


def test_a_failed_probe_may_have_a_grace_of_its_own() -> None:
    one = launch({"livenessProbe": {"terminationGracePeriodSeconds": 3}, "startupProbe": {}}, Image(), {})
    assert [one.grace_of(probe) for probe in ("livenessProbe", "startupProbe")] == [3, 30]


def test_the_back_off_of_a_kubelet() -> None:
    """Nothing, 10 s, 20 s … 5 min; a run of more than ten minutes begins anew."""
    backoff = CrashBackoff(haste=1)
    assert [backoff.after(1) for _ in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert [backoff.after(ran) for ran in (600, 601, 1)] == [300, 0, 10]


def test_the_back_off_here_is_a_tenth_in_all_its_times() -> None:
    backoff = CrashBackoff()
    assert [backoff.after(1) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert [backoff.after(ran) for ran in (60, 61, 1)] == [30, 0, 1]


def test_a_condition_tells_when_it_became_what_it_is() -> None:
    def told(status: str, before: dict[str, Any] | None, second: int) -> dict[str, Any]:
        condition = {"type": "Ready", "status": status}
        return with_transitions({"conditions": [condition]}, before, NOW.replace(second=second))

    first = told("False", None, 1)
    same = told("False", first, 2)
    changed = told("True", same, 3)
    times = [one["conditions"][0]["lastTransitionTime"] for one in (first, same, changed)]
    assert times == ["2026-01-01T00:00:01Z", "2026-01-01T00:00:01Z", "2026-01-01T00:00:03Z"]


@pytest.mark.parametrize("optional", [True, False])
async def test_a_config_map_that_is_missing_is_an_empty_directory_if_it_may_be(
    tmp_path: Path, optional: bool
) -> None:
    class Nothing:
        async def get(self, path: str) -> None:
            raise NotFound(404, "NotFound", path)

    client: Any = Nothing()
    volume = {"name": "config", "configMap": {"name": "c", "optional": optional}}
    pod = {"metadata": {"namespace": "n"}, "spec": {"volumes": [volume]}}
    volumes = Volumes(client, pod, tmp_path, host=tmp_path, addresses=Addresses("10.0.0.1", "10.0.0.2"))
    if not optional:
        with pytest.raises(NotFound):
            await volumes.make()
        return
    await volumes.make()
    (place,) = volumes.mounts_of({"volumeMounts": [{"name": "config", "mountPath": "/c"}]}).values()
    assert list(Path(place).iterdir()) == []
