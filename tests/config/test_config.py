"""Settings: precedence, and one clear line for each mistake."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from tangram_hpc.app.worker import node_spec, pull_settings, sandbox_settings
from tangram_hpc.config.allocations import elastic
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.config.services import options_of, service_spec
from tangram_hpc.config.settings import load_config
from tangram_hpc.config.tenants import tenant_spec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.images.pull import PullSettings
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.protocol.message import WorkerWelcome
from tangram_hpc.sandbox.manager.backends import Backends


def test_command_line_beats_environment_beats_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "tangram.toml"
    file.write_text('placer = "fcfs:2"\ngrace_s = 5\nsync = "batch"\n')
    environ = {"TANGRAM_GRACE_S": "7", "TANGRAM_HOME": "x", "TANGRAM_CONFIG": str(file)}
    config = load_config(environ, {"sync": "always", "placer": None})
    assert (config.placer, config.grace_s, config.sync) == ("fcfs:2", 7.0, "always")
    assert load_config({}).placer == "elastic"


@pytest.mark.parametrize(
    ("text", "environ", "told"),
    [
        ('placr = "fcfs:2"', {}, r"`placr` .*tangram.toml.* not known; did you mean `placer`"),
        ("grace_s = -1", {}, r"`grace_s` .*tangram.toml.*greater than or equal to 0"),
        ('placer = "best"', {}, r"`placer` .*elastic, paper, first-fit, fcfs:K, static:K"),
        ("", {"TANGRAM_SYNC": "sometimes"}, r"`sync` \(TANGRAM_SYNC\)"),
        ("mem_overcommit = 0.5", {}, r"`mem_overcommit` .*greater than or equal to 1"),
        ("", {"TANGRAM_ISOLATION": "docker"}, r"`isolation` \(TANGRAM_ISOLATION\)"),
        ("", {"TANGRAM_READ_PATHS": "opt"}, r"`read_paths` .*begin with /"),
        ("", {"TANGRAM_DEVICES": "cpu:0"}, r"`devices` \(TANGRAM_DEVICES\).*cpu:N, fake"),
        ('devices = "gpu"', {}, r"`devices` .*tangram.toml.*empty, none, cpu"),
        ("", {"TANGRAM_CPUS": "many"}, r"`cpus` \(TANGRAM_CPUS\).*'many'"),
        ("grace_s = ", {}, r"config file .*tangram.toml"),
        ("", {"TANGRAM_END": "99999999999"}, r"`end` \(TANGRAM_END\).*at most 4000000000"),
        *((f"{name} = 99999999999999999999", {}, rf"`{name}` .*less than or equal to 1099511627776")
          for name in ("once_mib", "mem_mib", "weights_cache_mib", "disk_mib", "snapshots_mib",
                       "image_store_mib")),
        ("cpus = true", {}, r"`cpus` .*tangram.toml.*must be a number"),
        ("grace_s = false", {}, r"`grace_s` .*must be a number"),
        ('ports = "7000-6000"', {}, r"`ports` .*first and the last of a range.*'7000-6000'"),
        ("", {"TANGRAM_PORTS": "70000"}, r"`ports` \(TANGRAM_PORTS\).*from 1 to 65535"),
        ('books = "oracle://x"', {}, r"`books` .*postgresql://.*mariadb://.*sqlite:////PATH"),
        ('books = "nonsense"', {}, r"`books` .*databases that work"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
        tmp_path: Path, text: str, environ: dict[str, str], told: str) -> None:
    file = tmp_path / "tangram.toml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=told) as error:
        load_config({**environ, "TANGRAM_CONFIG": str(file)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("check", "told"), [
    (lambda: elastic({"max_nodes": True}), r"elastic.max_nodes`: must be a number"),
    *((lambda name=name: elastic({name: 1e308}), rf"elastic.{name}`: .*less than or equal to")
      for name in ("max_core_hours", "idle_release_s", "target_s", "grow_after_s", "arrive_s",
                   "patience_s", "join_s", "backoff_s", "backoff_max_s")),
    (lambda: tenant_spec("a", {"shares": True}), "tenant a: shares: must be a number"),
    (lambda: service_spec("rm", {"backend": "fake", "batch": True}), "batch: must be a number"),
    (lambda: service_spec("rm", {"backend": "fake", "degrees": [True]}), "degrees: must be a numb"),
    (lambda: service_spec("rm", {"backend": "fake", "wake_s": inf}), "wake_s.*finite"),
    (lambda: service_spec("rm", {"backend": "fake", "restore_s": inf}), "restore_s.*finite"),
    (lambda: service_spec("rm", {"backend": "torch", "model": "models/rm"}),
     "service rm: model: 'models/rm' must be an absolute path: the service's process has another"),
    (lambda: service_spec("rm", {"backend": "torch", "model": "/m", "fresh": "run/fresh"}),
     "service rm: fresh: 'run/fresh' must be an absolute path"),
    (lambda: rollouts_spec(5, {}), "rollouts name: 5 must be one word"),  # type: ignore[arg-type]
])
def test_a_table_with_a_wrong_name_or_number_is_refused_in_one_line(
        check: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        check()


def test_the_folders_of_a_service_may_begin_with_the_home_folder(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    spec = service_spec("lm", {"backend": "torch", "model": "~/lm", "fresh": "~/fresh"})
    options = options_of(spec)
    assert (options.model, options.fresh) == ("/home/ann/lm", "/home/ann/fresh")


def test_a_settings_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "tangram.toml"
    file.write_bytes(b'\xef\xbb\xbfplacer = "fcfs:2"\r\n')
    assert load_config({"TANGRAM_CONFIG": str(file)}).placer == "fcfs:2"


def test_a_pipe_is_refused_as_a_settings_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="pipe: it is a pipe, which can be read only once"):
        load_config({"TANGRAM_CONFIG": str(tmp_path / "pipe")})


def test_a_variable_with_nearly_the_name_of_a_setting_is_told(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
        ) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path), "TANGRAM_GRACE": "5", "TANGRAM_CPUS_MAX": "4",
               "TANGRAM_CPUS_FILE": "/f", "TANGRAM_JOIN_S": "9", "TANGRAM_SCRATCH_JOB": "7",
               "TANGRAM_TEAM": "blue"}
    load_config(environ)
    assert capsys.readouterr().err == ("tangram: warning: TANGRAM_GRACE is not a setting and has "
                                       "no effect; did you mean TANGRAM_GRACE_S?\n")
    load_config(environ, say=False)
    assert capsys.readouterr().err == ""


def test_lists_come_from_the_environment_as_text(tmp_path: Path) -> None:
    file = tmp_path / "tangram.toml"
    file.write_text('read_paths = ["/a", "/b"]\nmem_overcommit = 1.5\n')
    config = load_config({"TANGRAM_CONFIG": str(file)})
    assert (config.read_paths, config.mem_overcommit) == (("/a", "/b"), 1.5)
    for text in ("/c:/d", "/c,/d", "/c,/d,"):
        assert load_config({"TANGRAM_READ_PATHS": text}).read_paths == ("/c", "/d")
    assert load_config({}).read_paths == ()


def test_settings_of_images_reach_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOSE", "me")
    config = load_config({"TANGRAM_IMAGE_SHARES": "/a:/b", "TANGRAM_IMAGE_INSECURE": "r:5000,s"},
                         {"image_store": "/local/$WHOSE/images", "image_max_mib": 7,
                          "image_store_mib": 9, "image_registries": False})
    assert pull_settings(config, Path("/scratch"), "/job") == PullSettings(
        "/local/me/images", ("/a", "/b"), "/job", ("r:5000", "s"), False, 7, 9)
    assert pull_settings(load_config({}), Path("/scratch")) == PullSettings("/scratch")
    with pytest.raises(InvalidInput, match=r"`image_store`: /local/\$NOBODY_SET_IT"):
        pull_settings(load_config({}, {"image_store": "/local/$NOBODY_SET_IT"}), Path("/scratch"))
    with pytest.raises(InvalidInput, match=r"`image_store`.*begin with /"):
        load_config({}, {"image_store": "relative"})


def test_settings_reach_the_node_and_its_sandboxes() -> None:
    config = load_config({}, {"mem_overcommit": 2.5, "mem_mib": 100, "disk_mib": 7, "warm": 3,
                              "starts_max": 2, "session_pids": 99, "read_paths": ["/opt"]})
    backends = Backends(("process", "podman"), ("podman",))
    spec = node_spec(config, {}, backends)
    assert (spec.mem_mib, spec.backends, spec.untrusted) == (250, backends.trusted, ("podman",))
    told = sandbox_settings(config, WorkerWelcome(1, "", 5.0, 4096))
    assert told == SandboxSettings(7, 99, 2, "", "", ("/opt",), 3, 5.0, 4096)
    with pytest.raises(InvalidInput, match="`isolation`: enroot cannot be used here"):
        Backends.probed("enroot")
    with pytest.raises(InvalidInput, match=r"`read_paths`: .*all of"):
        Backends.probed(read_paths=["/"])


def test_a_worker_lends_the_memory_of_its_own_het_component() -> None:
    """A job step of any component has component 0's memory in the names without a number."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "900",
               "SLURM_MEM_PER_NODE_HET_GROUP_0": "900", "SLURM_MEM_PER_NODE_HET_GROUP_1": "300",
               "SLURM_MEM_PER_CPU_HET_GROUP_2": "50"}
    assert [node_spec(load_config({}), environ, Backends((), ()), het_group=n).mem_mib
            for n in (-1, 0, 1, 2)] == [900, 900, 300, 200]


def test_a_missing_named_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        load_config({"TANGRAM_CONFIG": str(tmp_path / "no.toml")})
