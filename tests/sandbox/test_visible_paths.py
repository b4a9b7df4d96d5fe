"""What of a machine a sandbox may see: enough for programs to run, and nothing of its user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc.sandbox.isolation import visible_paths

WHOLE = ["/", "/home", "/root", "/tmp", "/run", "/var", "/var/lib", "/etc", "/dev", "/proc", "/sys"]


def shown(path: str, paths: list[str]) -> bool:
    """Whether a list shows this path by the name it is asked for, or by where that leads."""
    return any(name == own or name.startswith(own + "/")
               for name in (path, os.path.realpath(path)) for own in paths)


def test_the_files_that_programs_need_are_shown() -> None:
    paths = visible_paths.readable()
    for needed in ("/bin/sh", "/usr/bin/env", "/etc/passwd", "/etc/nsswitch.conf", sys.executable,
                   os.path.realpath(sys.executable), os.__file__,
                   "/sys/devices/system/cpu/online"):
        assert not os.path.exists(needed) or shown(needed, paths), needed
    assert paths == list(dict.fromkeys(paths)), "no path twice"
    assert all(os.path.isabs(path) and os.path.exists(path) for path in paths)


def test_a_link_that_leads_nowhere_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    """Such as /etc/default/locale of Ubuntu 26.04 before it is set."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    monkeypatch.setattr(visible_paths, "_SYSTEM", [f"{tmp_path}/*"])
    paths = visible_paths.readable()
    assert f"{tmp_path}/file" in paths
    assert not {f"{tmp_path}/link", f"{tmp_path}/nowhere"} & set(paths)


def test_no_home_or_system_folder_is_shown_as_a_whole() -> None:
    home = os.path.expanduser("~")
    paths = visible_paths.readable()
    for path in paths:
        real = os.path.realpath(path)
        for whole in [*WHOLE, home, os.path.realpath(home)]:
            assert real != whole and not whole.startswith(real + "/"), (path, whole)
    for secret in ("/etc/shadow", "/etc/gshadow", "/etc/munge/munge.key", "/etc/slurm/slurm.conf",
                   "/etc/ssh/ssh_host_rsa_key", "/etc/ssl/private", "/run/munge/munge.socket.2",
                   f"{home}/.ssh/id_rsa", f"{home}/.tangram/key", "/dev/shm", "/proc/1/environ",
                   "/dev/kmsg", "/etc/sudoers", "/var/spool/slurmd"):
        assert not shown(secret, [*paths, *visible_paths.devices()]), secret


def test_a_link_is_shown_by_its_name_and_its_target(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    link, real = str(tmp_path / "link"), str(tmp_path / "real")
    assert visible_paths.distinct([link]) == [link, real]
    assert visible_paths.distinct([real, link]) == [real, link]
    assert visible_paths.distinct([real, f"{real}/inner", f"{real}/"]) == [real]
    assert visible_paths.distinct([link, f"{link}/inner"]) == [link, real], \
        "what a bind of it shows too"
    other = tmp_path / "real-not"
    other.mkdir()
    assert visible_paths.distinct([real, str(other)]) == [real, str(other)], \
        "a longer name is another one"
    if os.path.islink("/bin"):
        assert visible_paths.distinct(["/usr", "/bin"]) == ["/usr", "/bin"]


def test_a_relative_link_below_a_linked_folder_leads_from_the_real_folder(tmp_path: Path) -> None:
    """As `python` of an environment that is reached over a link to its folder."""
    for folder in ("real/deep/bin", "real/deep/base", "base"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "real/deep/base/python3").touch()
    (tmp_path / "real/deep/base/python").symlink_to("python3")
    (tmp_path / "real/deep/bin/python").symlink_to("../base/python")
    (tmp_path / "bin").symlink_to("real/deep/bin")
    linked, real = str(tmp_path / "bin/python"), str(tmp_path / "real/deep/base/python")
    assert visible_paths._links(linked) == [linked, real]


def test_a_site_adds_readable_paths(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    assert shown(str(tools), visible_paths.readable([str(tools)]))
    assert not shown(str(tools), visible_paths.readable())


@pytest.mark.parametrize(("path", "told"), [
    *((path, "shows") for path in WHOLE), ("/usr/../etc", "shows"), ("/usr/../tmp/", "shows"),
    ("tools", "not absolute"), ("/none/such", "not there"), ("/proc/self/root", "shows")])
def test_a_readable_path_that_shows_secrets_is_refused(path: str, told: str) -> None:
    if told == "shows" and not os.path.exists(path):
        pytest.skip(f"{path} is not there")
    with pytest.raises(ValueError, match=f"readable path '{path}'.*{told}"):
        visible_paths.readable([path])


def test_homes_and_their_secrets_are_not_shown(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".ssh/keys", "tools/bin"):
        (tmp_path / "home" / name).mkdir(parents=True)
    (tmp_path / "way").symlink_to("home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for bad in ("home", "way", "home/.ssh", "home/.ssh/keys", "way/.ssh", "."):
        assert "shows" in visible_paths.refusal(f"{tmp_path}/{bad}"), bad
    assert visible_paths.refusal(f"{tmp_path}/home/tools") == ""
    assert visible_paths.refusal(f"{tmp_path}/way/tools") == ""


def test_a_python_that_lives_right_in_a_home_is_shown_in_parts(
        monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.base_prefix.startswith("/usr"):
        pytest.skip("this Python lives in /usr")
    monkeypatch.setenv("HOME", sys.base_prefix)
    paths = visible_paths.readable()
    assert not shown(f"{sys.base_prefix}/documents", paths)
    assert shown(os.__file__, paths) and shown(os.path.realpath(sys.executable), paths)


def test_an_interpreter_that_is_a_link_over_another_link_is_shown(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a virtual environment that was made with ~/.local/bin/python3."""
    link = tmp_path / "tools" / "python3"
    link.parent.mkdir()
    link.symlink_to(os.path.realpath(sys.executable))
    environment = tmp_path / "environment"
    subprocess.run([link, "-m", "venv", "--without-pip", environment], check=True)
    for name, value in (("executable", f"{environment}/bin/python"), ("prefix", str(environment)),
                        ("exec_prefix", str(environment))):
        monkeypatch.setattr(sys, name, value)
    paths = visible_paths.readable()
    assert str(link) in paths and not shown(f"{link.parent}/other", paths)
    monkeypatch.setenv("HOME", str(environment))  # then it is shown in parts
    assert str(link) in visible_paths.readable()


def test_the_shown_devices_can_be_read() -> None:
    assert "/dev/null" in visible_paths.devices() and "/dev/urandom" in visible_paths.devices()
    assert not {"/dev/tty", "/dev/shm", "/dev/mem"} & set(visible_paths.devices())
    for device in visible_paths.devices():
        with open(device, "rb") as file:
            file.read(1)


def test_a_program_under_bwrap_sees_only_the_listed_paths() -> None:
    """The list as it stands, each path bound at its own name."""
    argv = ["bwrap", "--unshare-all", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in visible_paths.readable():
        argv += ["--ro-bind", path, path]
    script = "import os; print(os.path.exists('/etc/passwd'), os.path.exists('/etc/shadow'))"
    try:
        done = subprocess.run([*argv, sys.executable, "-c", script], capture_output=True,
                              text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("bwrap is not installed")
    if "No permissions to create" in done.stderr or "namespace" in done.stderr:
        pytest.skip(f"bwrap does not work here: {done.stderr.strip()}")
    assert done.stdout == "True False\n", done.stderr
