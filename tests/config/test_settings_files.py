"""Which settings files are read: a file in the current directory only when it is named, the user's
and the site's only where nobody else can have written them; and what is said about files that are
not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.forked_verb import tangram

from tangram_hpc.cli.broker import _scripts
from tangram_hpc.errors import InvalidInput

ELSE = 54321  # an account that is neither this one nor root
GPUS = ("import tangram_hpc\n"
        "with tangram_hpc.LocalCluster(cpus=1) as c: print('gpus', c.ask('info')['gpus'])")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with `repository/tangram.toml` in it, which the user did not write."""
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "tangram.toml").write_text('devices = "cpu:3"\n')
    (tmp_path / ".config" / "tangram").mkdir(parents=True)
    for folder in (tmp_path / ".config", tmp_path / ".config" / "tangram"):
        folder.chmod(0o755)
    return tmp_path


def run(home: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the repository, as a user with that home and no other settings."""
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith(("TANGRAM_", "SLURM_", "XDG_"))}
    environ, folder = {**kept, "HOME": str(home), **environ}, home / "repository"
    if words[:2] == ("-m", "tangram_hpc"):
        return tangram(*words[2:], cwd=folder, env=environ)
    return subprocess.run([sys.executable, *words], cwd=folder, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=60, env=environ, check=False)


def gpus(home: Path, **environ: str) -> tuple[str, str]:
    """What an embedded cluster lends that is started in the repository, and its standard error."""
    told = run(home, "-c", GPUS, **environ)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip(), told.stderr


def setting(home: Path, name: str, *words: str, **environ: str) -> tuple[object, str]:
    """A setting in force and its source, by `tangram config`."""
    told = run(home, "-m", "tangram_hpc", "config", "--json", *words, **environ)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)[name]
    return found["value"], found["from"]


def user_file(home: Path, text: str) -> Path:
    path = home / ".config" / "tangram" / "tangram.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


@pytest.mark.attack("repository", "settings", "keys")
def test_a_settings_file_in_the_current_directory_is_ignored_with_a_warning(home: Path) -> None:
    """A repository's settings reach neither broker nor worker; one line names the remedy."""
    lent, said = gpus(home)
    assert lent == "gpus 0"
    assert said.count("\n") == 1 and f"{home}/repository/tangram.toml is not read" in said
    assert "`--config tangram.toml`" in said and "TANGRAM_CONFIG=" in said
    assert str(home / ".config" / "tangram" / "tangram.toml") in said


def test_a_named_settings_file_is_read_without_a_warning(home: Path) -> None:
    """TANGRAM_CONFIG and --config, before and after the verb, read the file that they name."""
    named = home / "repository" / "tangram.toml"
    assert gpus(home, TANGRAM_CONFIG="tangram.toml") == ("gpus 3", "")
    assert setting(home, "devices", TANGRAM_CONFIG=str(named)) == ("cpu:3", str(named))
    for words in (("config", "--json", "--config", "tangram.toml"),
                  ("--config", "tangram.toml", "config", "--json")):
        told = run(home, "-m", "tangram_hpc", *words)
        assert (told.returncode, told.stderr) == (0, "")
        assert json.loads(told.stdout)["devices"] == {"value": "cpu:3", "from": str(named)}
    told = run(home, "-m", "tangram_hpc", "config", "--config", "none.toml")
    assert told.returncode == 2 and "none.toml: No such file" in told.stderr


def test_the_users_settings_file_is_read(home: Path) -> None:
    """~/.config/tangram/tangram.toml is read, XDG_CONFIG_HOME moves it, and a named file wins."""
    own = user_file(home, 'devices = "cpu:2"\ngrace_s = 7\n')
    assert gpus(home)[0] == "gpus 2"
    assert setting(home, "grace_s") == (7.0, str(own))
    own.parent.rename(home / "tangram")
    assert setting(home, "grace_s") == (30.0, "default")
    moved = str(home / "tangram" / "tangram.toml")
    assert setting(home, "grace_s", XDG_CONFIG_HOME=str(home)) == (7.0, moved)
    assert setting(home, "devices", "--config", "tangram.toml", XDG_CONFIG_HOME=str(home))[0] == (
        "cpu:3")
    assert setting(home, "grace_s", "--config", "tangram.toml", XDG_CONFIG_HOME=str(home))[0] == 7.0
    assert setting(home, "grace_s", XDG_CONFIG_HOME=str(home), TANGRAM_GRACE_S="8") == (
        8.0, "TANGRAM_GRACE_S")


@pytest.mark.parametrize(("text", "told"), [
    ("[elastic]\nfoo = 1", "config field `elastic.foo`: is not known"),
    ("[planner]\nfoo = 1", "[planner] foo: is not known"),
    ("[endpoints.a]\nfoo = 1", "endpoint a: foo: is not known"),
    ("[services.a]\nbackend = 'foo'", "service a: backend: 'foo'"),
    ("[rollouts.a]\nfoo = 1", "rollouts a: foo: is not known"),
    ("[tenants.a]\nfoo = 1", "tenant a: foo: is not known")])
def test_the_tables_of_the_settings_are_checked(home: Path, text: str, told: str) -> None:
    """`tangram config` refuses a table that a broker would refuse."""
    user_file(home, text)
    said = run(home, "-m", "tangram_hpc", "config")
    assert (said.returncode, said.stderr.count("\n"), said.stdout) == (2, 2, "")
    assert told in said.stderr


def test_a_bind_that_this_host_does_not_have_is_told(home: Path) -> None:
    """It is no error: the broker may run on another host."""
    said = run(home, "-m", "tangram_hpc", "config", TANGRAM_BIND="nosuch0")
    assert said.returncode == 0 and "'nosuch0' is no interface" in said.stderr


def refused(home: Path) -> str:
    """The line with which a verb that reads settings ends."""
    told = run(home, "-m", "tangram_hpc", "plan", "--model", "qwen3-14b", "--gpus", "48",
               TANGRAM_CONFIG="tangram.toml")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr
    return told.stderr


@pytest.mark.parametrize(("name", "mode", "whose"), [
    (".config/tangram/tangram.toml", 0o664, "its group"),
    (".config/tangram/tangram.toml", 0o646, "others"),
    (".config/tangram", 0o775, "its group"), (".config", 0o777, "others"),
    ("", 0o770, "its group")])
@pytest.mark.attack("user", "settings")
def test_a_settings_file_that_other_users_can_write_to_is_refused(
        home: Path, name: str, mode: int, whose: str) -> None:
    """The file and each folder up to the home are checked; the remedy in the message works."""
    user_file(home, "grace_s = 7\n")
    (home / name).chmod(mode)
    part = home / name
    assert (f"refused, since {whose} can write to {part} (mode {mode:04o}); `chmod go-w {part}`"
            in refused(home))
    subprocess.run(["chmod", "go-w", str(part)], check=True)
    assert setting(home, "grace_s")[0] == 7.0


@as_root
@pytest.mark.parametrize("name", [".config/tangram/tangram.toml", ".config/tangram", ""])
@pytest.mark.attack("user", "settings")
def test_a_users_file_of_another_account_is_refused(home: Path, name: str) -> None:
    """The owner of the file, or of a folder above it, can write it whatever its mode is."""
    user_file(home, "grace_s = 7\n")
    os.chown(home / name, ELSE, ELSE)
    assert f"since {home / name} belongs to user {ELSE}" in refused(home)


@pytest.mark.attack("user", "settings")
def test_the_folders_of_a_linked_settings_file_are_checked(home: Path) -> None:
    """A link to a file elsewhere is followed, and the folders of its target are checked."""
    elsewhere = home / "dotfiles"
    elsewhere.mkdir()
    user_file(home, "grace_s = 7\n").rename(elsewhere / "t.toml")
    (home / ".config" / "tangram" / "tangram.toml").symlink_to("../../dotfiles/t.toml")
    elsewhere.chmod(0o755)
    assert setting(home, "grace_s")[0] == 7.0
    elsewhere.chmod(0o757)
    assert f"others can write to {elsewhere}" in refused(home)
    elsewhere.chmod(0o1757)  # sticky, as /tmp: nobody else can replace the file in it
    assert setting(home, "grace_s")[0] == 7.0
    if os.geteuid() == 0:
        os.chown(home / ".config" / "tangram" / "tangram.toml", ELSE, ELSE, follow_symlinks=False)
        assert f"belongs to user {ELSE}" in refused(home)


def test_folders_without_a_settings_file_are_not_checked(home: Path) -> None:
    """A home that its group may write to, as some sites make them, is harmless without such a
    file."""
    home.chmod(0o775)
    assert setting(home, "grace_s") == (30.0, "default")
    user_file(home, "grace_s = 7\n")
    assert f"its group can write to {home}" in refused(home)


def as_somebody_else(environ: dict[str, str], folder: Path) -> str:
    """What another account gets that reads its settings in a folder: `grace_s`, or an error."""
    from tangram_hpc.config.settings import load_config

    into, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setresgid(ELSE, ELSE, ELSE)
            os.setresuid(ELSE, ELSE, ELSE)
            os.environ.pop("HOME", None)
            text = str(load_config(environ).grace_s)
        except BaseException as error:  # noqa: BLE001 - told to the test
            text = f"{type(error).__name__}: {error}"
        os.write(out, text.encode())
        os._exit(0)
    os.close(out)
    os.waitpid(pid, 0)
    with open(into, "rb") as file:
        return file.read().decode()


@as_root
def test_an_unreadable_home_counts_as_without_settings(home: Path) -> None:
    """`sudo -u other` keeps HOME at a home of mode 0700; all verbs then use the defaults."""
    user_file(home, "grace_s = 7\n")
    home.chmod(0o700)
    assert as_somebody_else({"HOME": str(home)}, Path("/")) == "30.0"


@as_root
def test_an_unreadable_current_folder_counts_as_without_settings(home: Path) -> None:
    """It is unknown whether the folder has a `tangram.toml`, so no warning is printed."""
    (home / "repository").chmod(0o700)
    assert as_somebody_else({"HOME": "/"}, home / "repository") == "30.0"


@as_root
def test_a_user_without_HOME_is_told_to_set_it() -> None:
    """A user id without an entry in the password database, as in some containers."""
    assert as_somebody_else({}, Path("/")).startswith("InvalidInput: HOME is not set")


def test_the_users_settings_override_the_sites_settings(
        home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/tangram is checked in the same way and read first; here it is in another place."""
    from tangram_hpc.config import settings as config

    site = home / "etc" / "tangram.toml"
    site.parent.mkdir(mode=0o755)
    site.write_text("grace_s = 5\njoin_s = 6\n")
    site.chmod(0o644)
    assert Path("/etc/tangram/tangram.toml") == config.SITE_FILE
    monkeypatch.setattr(config, "SITE_FILE", site)
    monkeypatch.chdir(home)
    user_file(home, "grace_s = 7\n")
    found = config.load_config({"HOME": str(home)})
    assert (found.grace_s, found.join_s) == (7.0, 6.0)
    site.chmod(0o666)
    with pytest.raises(InvalidInput, match=f"others can write to {site}"):
        config.load_config({"HOME": str(home)})


def test_doctor_names_the_settings_files_that_are_read(home: Path) -> None:
    """One check of doctor's page lists the files that are read, or says that the folder's own is
    not."""
    code = ("from tangram_hpc.doctor import storage; import os, types\n"
            "found = storage.settings(types.SimpleNamespace(wrong='', environ=dict(os.environ)))\n"
            "print(found)")
    own = user_file(home, "grace_s = 7\n")
    told = run(home, "-c", code).stdout
    assert "warn" in told and str(own) in told and "tangram.toml is not read" in told
    told = run(home, "-c", code, TANGRAM_CONFIG="tangram.toml").stdout
    assert "warn" not in told and f"{own}; tangram.toml" in told


def test_satellites_get_the_absolute_path_of_the_brokers_settings_file(
        home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path relative to the broker's folder would name nothing in a satellite's."""
    from tangram_hpc.config.allocations import elastic

    monkeypatch.chdir(home / "repository")
    table = {"max_nodes": 1, "max_core_hours": 1,
             "satellites": [{"name": "a", "cpus": 1}]}
    made = _scripts(elastic(table), "7", {"TANGRAM_HOME": "/h", "TANGRAM_CONFIG": "tangram.toml"})
    assert made.environ["TANGRAM_CONFIG"] == str(home / "repository" / "tangram.toml")
