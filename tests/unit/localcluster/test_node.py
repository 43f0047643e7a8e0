"""What decides whether a machine runs a real node, and what happens where it does not."""

import pytest

from localcluster import images
from localcluster.node import prepare, probe, settings


@pytest.fixture
def unable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(prepare, "node_directory", lambda: pytest.fail("built for nobody"))


@pytest.mark.usefixtures("unable")
def test_who_is_not_root_is_told_so_and_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    prepare.prepare()
    assert capsys.readouterr().err.strip().endswith("only root may make a node's namespaces and cgroups")


@pytest.mark.usefixtures("unable")
def test_in_ci_a_machine_that_cannot_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(SystemExit, match="only root"):
        prepare.prepare()


def test_a_missing_program_names_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, path: None if program == "portmap" else f"/{program}")
    assert probe.missing_packages() == ["containernetworking-plugins"]


def test_what_a_node_and_its_images_lack_is_installed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []
    monkeypatch.setattr("shutil.which", lambda program, path=None: None)
    monkeypatch.setattr(prepare, "install", asked.append)
    monkeypatch.setattr(probe, "lacking", lambda: "enough")
    monkeypatch.delenv("CI", raising=False)
    prepare.prepare()
    (packages,) = asked
    assert packages >= {"containerd", "runc", "buildah", "mmdebstrap", "gcc", "libc6-dev"}
    assert packages == {*probe.missing_packages(), *images.missing_packages()}


def test_pods_and_their_node_are_in_different_networks() -> None:
    ranges = settings.cni()["plugins"][0]["ipam"]["ranges"]
    assert ranges == [[{"subnet": settings.POD_NETWORK}]]
    assert settings.ADDRESS.rpartition(".")[0] != settings.POD_NETWORK.rpartition(".")[0]
