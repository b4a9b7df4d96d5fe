"""Secrets are given by name and reach the commands of their sessions, and nothing else."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.storage.secrets_file import SecretsFile

VALUE = "tok-" + os.urandom(12).hex()
DIGEST = hashlib.sha256(VALUE.encode()).hexdigest()
SHOWS = 'printf %s "$SEARCH_KEY" | sha256sum'
LOOKS = f"""
import glob
half = {VALUE[:9]!r}, {VALUE[9:]!r}
value = "".join(half).encode()
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        if value in open(path, "rb").read():
            print(path)
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def cluster(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))
        with LocalCluster(cpus=2, home=home, warm=1) as c:
            c.keep_secrets({"SEARCH_KEY": VALUE, "OTHER": "x"})
            yield c


def holds_value(*folders: Path) -> list[str]:
    return [str(path) for folder in folders for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink() and VALUE.encode() in path.read_bytes()]


def test_a_secret_reaches_its_sessions_commands_alone(cluster: LocalCluster, home: Path) -> None:
    scratch = Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else home
    with cluster.session(secrets=["SEARCH_KEY"], movable=True) as s, cluster.session() as other:
        for _ in range(4):  # Python serves the first, the compiled loop those that follow
            assert s.exec(SHOWS).result().text.split()[0] == DIGEST
        assert s.exec(SHOWS, env={"SEARCH_KEY": "mine"}).result().text.split()[0] != DIGEST
        with s.fork() as branch:
            assert branch.exec(SHOWS).result().text.split()[0] == DIGEST
        with cluster.session(secrets={"KEY": "SEARCH_KEY"}) as renamed:
            assert renamed.exec('test -z "$SEARCH_KEY"; printf %s "$KEY" | sha256sum'
                                ).result().text.split()[0] == DIGEST
        running = s.exec("sleep 60")
        looks = [sys.executable, "-c", LOOKS]
        for done in (other.exec(looks), cluster.submit(looks), other.exec("env | grep SEARCH_KEY")):
            assert done.result().text == "", done.result()
        assert cluster.submit('test -z "$SEARCH_KEY"').result().ok
        mine = subprocess.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], capture_output=True,
                              check=False).stdout
        assert VALUE.encode() not in mine
        assert running.cancel()
        shown = repr((s.spec, s.env, vars(s), cluster.ask("status"), running))
        assert VALUE not in shown and "SEARCH_KEY" in repr(s.spec)
        assert holds_value(cluster.folder, scratch, home) and set(
            holds_value(cluster.folder, scratch, home)) == {str(cluster.folder / "secrets.json")}
        assert any(b"SEARCH_KEY" in path.read_bytes() for path in cluster.folder.glob("journal*"))


def test_a_secret_that_is_not_kept_is_named_when_the_session_opens(cluster: LocalCluster) -> None:
    with pytest.raises(tangram_hpc.SessionLost, match=r"secrets: NOPE: not among .*keep_secrets"):
        cluster.session(secrets=["SEARCH_KEY", "NOPE"]).opened.result(60)
    for wrong in ("SEARCH_KEY", [""], ["a b"], [VALUE], {"A": 1}, {"A=B": "SEARCH_KEY"}, 7,
                  [f"A{n}" for n in range(65)]):
        with pytest.raises(tangram_hpc.InvalidInput, match="secrets: ") as error:
            cluster.session(secrets=wrong)
        assert VALUE not in str(error.value)
    for values in ({"A": 1}, {"A": VALUE + "\0"}, {"A": VALUE + "\udc80"}, {"a b": "x"}, "A"):
        with pytest.raises(tangram_hpc.InvalidInput) as error:
            cluster.keep_secrets(values)
        assert VALUE not in str(error.value)
    cluster.keep_secrets({"OTHER": None})
    with pytest.raises(tangram_hpc.SessionLost, match="OTHER"):
        cluster.session(secrets=["OTHER"]).opened.result(60)


def test_the_secrets_file_is_private_and_removed_with_its_job(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        c.keep_secrets({"A": VALUE})
        path = c.folder / "secrets.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o640)
        with pytest.raises(tangram_hpc.SessionLost, match="others may read"):
            c.session(secrets=["A"]).opened.result(60)
    assert not path.exists() and holds_value(tmp_path) == []


def test_many_processes_keep_secrets_at_once(tmp_path: Path) -> None:
    source = ("import sys; from pathlib import Path; "
              "from tangram_hpc.storage.secrets_file import SecretsFile\n"
              "for n in range(30):\n"
              "    SecretsFile(Path(sys.argv[1])).keep({f'K{sys.argv[2]}_{n}': 'v'})")
    children = [subprocess.Popen([sys.executable, "-c", source, str(tmp_path), str(number)])
                for number in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    names = [f"K{number}_{n}" for number in range(3) for n in range(30)]
    assert set(SecretsFile(tmp_path).values(names).values()) == {"v"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "x", "secrets": {}}',
                                     '{"format": "tangram-secrets/1", "secrets": "VALUE"}'])
def test_a_damaged_secrets_file_is_reported_without_its_content(
        tmp_path: Path, content: str) -> None:
    path = tmp_path / "secrets.json"
    path.write_text(content.replace("VALUE", VALUE))
    path.chmod(0o600)
    with pytest.raises(tangram_hpc.InvalidInput, match="no file of secrets") as error:
        SecretsFile(tmp_path).values(["A"])
    assert VALUE not in str(error.value)
