"""Knative's ConfigMap, as a kubelet mounts it: what of it holds, and what happens when it changes."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.contract.scaling import ModelKey
from berth.runtime.errors import ConfigError
from scaler.config_map import ConfigMap, ConfigMapWatch, read_config, warn
from scaler.core.cache import Cache
from scaler.decision.defaults import BERTH, read_defaults
from tests.unit.scaler.test_cache import deployment


class Mounted:
    """A ConfigMap's directory, whose files a kubelet exchanges all at once."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._count = directory, 0

    def now(self, **keys: str) -> None:
        self._count += 1
        data = self.directory / f"..{self._count}"
        data.mkdir()
        for key, value in keys.items():
            name = key.replace("_", "-")
            (data / name).write_text(value)
            (self.directory / name).unlink(missing_ok=True)
            (self.directory / name).symlink_to(f"..data/{name}")
        link = self.directory / "..tmp"
        link.symlink_to(data.name)
        link.rename(self.directory / "..data")


def test_without_a_directory_berths_own_defaults_hold() -> None:
    assert read_config(None).data == {"target-burst-capacity": "0"}


def test_a_mounted_config_map_is_a_file_for_each_key(tmp_path: Path) -> None:
    """As a kubelet lays it out: the files are links into a hidden directory, which is replaced as one."""
    data = tmp_path / "..2026"
    data.mkdir()
    (tmp_path / "..data").symlink_to(data)
    for key, value in {"stable-window": "30s\n", "_example": "anything at all", "max-scale": "7"}.items():
        (data / key).write_text(value)
        (tmp_path / key).symlink_to(tmp_path / "..data" / key)
    config = read_config(tmp_path)
    assert config.data == {"target-burst-capacity": "0", "stable-window": "30s", "max-scale": "7"}
    assert not config.warnings


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"5s", "stable-window: '5s' is invalid; use 6s to 1h"),
        (b"\xff", "can't decode"),
    ],
)
def test_a_bad_key_is_named_at_the_start(tmp_path: Path, file: bytes, said: str) -> None:
    (tmp_path / "stable-window").write_bytes(file)
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path)


def test_a_directory_that_is_none_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*none"):
        read_config(tmp_path / "none")


@pytest.mark.parametrize("value", ["200", "-1", "211.5"])
def test_a_burst_capacity_is_overridden_and_the_warning_names_where_it_stands(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An ordinary ConfigMap of Knative's turned scaling off for all models."""
    (tmp_path / "target-burst-capacity").write_text(value)
    config = read_config(tmp_path)
    assert config.data["target-burst-capacity"] == "0"
    (warning,) = config.warnings
    assert f"{tmp_path}/target-burst-capacity: '{value}' is not honoured" in warning
    warn(config)
    assert warning in caplog.text or caplog.records[0].fields["warning"] == warning  # type: ignore[attr-defined]
    cache = Cache(config.defaults)
    cache.observe_deployment(deployment())
    assert not cache.problems()
    assert cache.deployments


@pytest.mark.parametrize("value", ["none", "-3"])
def test_a_burst_capacity_that_knative_refuses_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "target-burst-capacity").write_text(value)
    with pytest.raises(ConfigError, match="target-burst-capacity"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("activator-capacity", "has no effect"),
        ("pod-autoscaler-class", "once it names a class itself"),
        ("stable-windw", "did you mean stable-window?"),
        ("zzz", "no such key; it has no effect"),
    ],
)
def test_what_has_no_effect_is_reported(tmp_path: Path, key: str, said: str) -> None:
    """Nobody learned that these keys change nothing."""
    (tmp_path / key).write_text("100")
    (warning,) = read_config(tmp_path).warnings
    assert str(tmp_path / key) in warning
    assert said in warning


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("container-concurrency-target-default", "Inf"),
        ("requests-per-second-target-default", "+Inf"),
        ("container-concurrency-target-default", "NaN"),
        ("panic-threshold-percentage", "NaN"),
        ("max-scale-up-rate", "NaN"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, key: str, value: str) -> None:
    """Knative takes these, and then no model ever scales."""
    (tmp_path / key).write_text(value)
    with pytest.raises(ConfigError, match=f"{key}: .* is invalid; use a finite number"):
        read_config(tmp_path)


def test_a_rate_may_be_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "max-scale-up-rate").write_text("Inf")
    assert read_config(tmp_path).defaults.max_scale_up_rate == float("inf")


# --- while it runs ---------------------------------------------------------------------------------------------------


def test_all_keys_are_of_one_config_map_however_often_it_is_exchanged(tmp_path: Path) -> None:
    """What is read comes through the link that the kubelet exchanges, not file by file from beside it."""
    mounted = Mounted(tmp_path)
    mounted.now(stable_window="30s", max_scale="7")
    mounted.now(stable_window="40s")
    (tmp_path / "min-scale").write_text("1")
    assert read_config(tmp_path).data == {**BERTH, "stable-window": "40s"}


@pytest.mark.parametrize(("left", "seen"), [(0, False), (1, False), (1, True)])
def test_a_config_map_that_is_exchanged_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, seen: bool
) -> None:
    """A kubelet removes the old files once the link leads to the new ones: who had just begun to read found some, and
    took the defaults for the others. `left`: so many files of the old one it finds listed; `seen`: and
    there, until it opens them."""
    mounted, usual = Mounted(tmp_path), Path.iterdir
    mounted.now(enable_scale_to_zero="false", stable_window="30s")

    def listing(directory: Path) -> Iterator[Path]:
        found = list(usual(directory))
        if directory.name == "..1" and found:
            mounted.now(enable_scale_to_zero="false", stable_window="40s")
            for file in found:
                file.unlink()
        return iter(found[:left]) if directory.name == "..1" else iter(found)

    monkeypatch.setattr(Path, "iterdir", listing)
    if seen:
        monkeypatch.setattr(Path, "is_file", lambda _: True)
    read = read_config(tmp_path)
    assert read.data == {**BERTH, "enable-scale-to-zero": "false", "stable-window": "40s"}


def test_a_config_map_that_is_exchanged_at_every_look_is_read_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted, usual = Mounted(tmp_path), Path.iterdir
    mounted.now(stable_window="30s")

    def listing(directory: Path) -> Iterator[Path]:
        mounted.now(stable_window="40s")
        return usual(directory)

    monkeypatch.setattr(Path, "iterdir", listing)
    with pytest.raises(ConfigError, match="it is exchanged again and again"):
        read_config(tmp_path)


def test_a_link_that_leads_to_itself_and_a_value_without_end_are_reported_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "..data").symlink_to("..data")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        read_config(tmp_path)
    (tmp_path / "..data").unlink()
    (tmp_path / "stable-window").write_text("9" * 2**20)
    with pytest.raises(ConfigError, match="stable-window") as told:
        read_config(tmp_path)
    assert len(str(told.value)) < 1000


async def test_a_changed_config_map_is_applied_and_a_bad_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Knative watches its ConfigMap."""
    caplog.set_level(logging.INFO)
    mounted, applied, refused = Mounted(tmp_path), list[ConfigMap](), list[bool]()
    mounted.now(stable_window="30s")
    first = read_config(tmp_path)
    watch = ConfigMapWatch(tmp_path, first, applied.append, refused.append)
    await watch.step()
    assert (applied, refused) == ([], [False])
    mounted.now(stable_window="5s")
    await watch.step()
    await watch.step()
    assert (applied, refused) == ([], [False, True, True])
    told = [one for one in caplog.records if "rejected" in one.message]
    assert [one.levelname for one in told] == ["WARNING"]  # once, however often it is looked at
    assert "stable-window: '5s' is invalid" in str(told[0].fields["error"])  # type: ignore[attr-defined]
    mounted.now(stable_window="40s")
    await watch.step()
    assert [one.data["stable-window"] for one in applied] == ["40s"]
    assert refused[-1] is False
    mounted.now(stable_window="30s")
    await watch.step()
    assert applied[1:] == [first]


async def test_it_looks_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaler.config_map._LOOK_SECONDS", 0.01)
    applied = asyncio.Event()
    mounted = Mounted(tmp_path)
    mounted.now(stable_window="30s")
    watch = ConfigMapWatch(tmp_path, read_config(tmp_path), lambda _: applied.set())
    running = asyncio.create_task(watch.run())
    mounted.now(stable_window="40s")
    async with asyncio.timeout(20):
        await applied.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_other_defaults_reach_all_models_and_are_refused_for_those_they_do_not_fit() -> None:
    """Whose annotations do not go with them keeps what it had, and is told; when they go again, that holds."""
    cache, group = Cache(read_defaults(BERTH)), "autoscaling.knative.dev/"
    cache.observe_deployment(deployment())
    large = deployment({group + "max-scale": "9"}, uid="large", replicas=4)
    large["metadata"]["name"] = "large"
    cache.observe_deployment(large)
    key, small = ModelKey("a", "large"), ModelKey("a", "m")
    cache.configure(
        read_defaults({**BERTH, "stable-window": "30s", "max-scale-limit": "5", "max-scale": "5"})
    )
    assert cache.deployments[small].spec.stable_window_seconds == 30
    assert cache.deployments[key].spec.stable_window_seconds == 60
    assert cache.deployments[key].replicas == 4
    (complaint,) = cache.problems()
    assert complaint.key == key
    assert "the cluster's limit" in complaint.text
    cache.configure(read_defaults({**BERTH, "stable-window": "30s"}))
    assert cache.deployments[key].spec.stable_window_seconds == 30
    assert not cache.refused(key)
    cache.deployment_gone(large)
    cache.configure(read_defaults(BERTH))
    assert list(cache.deployments) == [small]
