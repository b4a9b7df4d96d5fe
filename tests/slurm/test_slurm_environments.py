"""Sessions that are environments, on a real Slurm of two nodes and for an ordinary user.

They have users of their image, servers, shells, snapshots between the nodes, an environment that is
prepared once, a rank that is killed and a scorer in another step; for a user with a range of
subordinate numbers, and for one without. A whole Debian with 30,000 files more is used as root
would, and forked 64 times.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import debian_commands
from helpers.debian_image import debian_image
from helpers.devcluster_fixture import running_cluster
from helpers.environment_image import environment_image
from helpers.image_rig import MadeImage, needs_registry, registry
from helpers.slurm_site import DATA, Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600),
              pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
              pytest.mark.skipif(not shutil.which("newuidmap"), reason="uidmap is not installed"),
              pytest.mark.skipif(not shutil.which("socat"), reason="socat is not installed")]

STATUSES = [["exit 0", "COMPLETED", 0], ["exit 7", "FAILED", 7], ["kill -9 $$", "FAILED", 137],
            ["nothing-here", "FAILED", 127], ["sleep 60", "TIMEOUT", 124],
            ["true", "FAILED", 126]]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two CPU nodes. The first user has a range, as `useradd` gives one; the second one has none.
    """
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=0, trainer_nodes=0, netns=True,
                         users=2, no_dbd=True) as cluster:
        _, second = cluster.users
        for what in ("uid", "gid"):
            for line in Path(f"/etc/sub{what}").read_text().splitlines():
                name, start, count = line.split(":")
                if name == second:
                    subprocess.run(["usermod", f"--del-sub{what}s",
                                    f"{start}-{int(start) + int(count) - 1}", second], check=True)
        yield Site(cluster, install_for(cluster))


@pytest.fixture(scope="module")
def image(nodes: Site, tmp_path_factory: pytest.TempPathFactory) -> MadeImage:
    """An image whose layout both users read."""
    made = environment_image(tmp_path_factory.mktemp("image"))
    made.layout(nodes.cluster.prefix / "layout")
    return made


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, nodes: Site) -> Iterator[tuple[str, str]]:
    """A release of Debian, and the name of an image of it that both users read."""
    if os.getuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("the image needs root and debootstrap")
    place = nodes.cluster.prefix / request.param
    place.mkdir()
    yield request.param, debian_image(request.param, place, debian_commands.PACKAGES,
                                      debian_commands.add_users)
    shutil.rmtree(place)


@pytest.fixture(params=["a range", "no range"])
def site(request: pytest.FixtureRequest, nodes: Site) -> Site:
    names = list(nodes.cluster.users)
    site = Site(nodes.cluster.of(names[request.param == "no range"]), nodes.venv)
    for name in ("trainer_environments.py", "trainer_debian.py"):
        shutil.copy(DATA / name, site.cluster.home)
    return site


def begin(site: Site, name: str, role: str, image: str = "", **keys: str) -> tuple[str, Path]:
    """Submits a job of two nodes with a rank on each; its id, and the folder for what they see."""
    folder = site.cluster.home / name
    site.cluster.run_as_user(["mkdir", str(folder)], check=True)
    image = image or f"oci:{site.cluster.prefix / 'layout'}"
    job = site.sbatch(name, f"python trainer_environments.py {role} {folder} {image}",
                      template="homogeneous", partition="cpu", nodes="2", cpus_lent="2",
                      cpus_per_rank="1", mem="1000", mpi="none", gateway="off", **keys)
    return job, folder


def facts(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def test_environments_of_an_ordinary_user_on_two_nodes(site: Site, image: MadeImage,
                                                       request: pytest.FixtureRequest) -> None:
    several = "no range" not in request.node.name
    job, folder = begin(site, "envs", "agent")
    site.until(lambda: (folder / "handle.json").exists() or not site.state(job),
               "the agent to kill itself", 240, lambda: site.output("envs", job))
    assert (folder / "handle.json").exists(), site.output("envs", job)
    scored = scorer(site, job, folder)
    said = site.finish("envs", job)
    first, second = facts(folder, "rank0"), facts(folder, "rank1")
    hosts = {first["host"], second["host"]}
    assert hosts == set(site.cluster.cpu_nodes), said

    used(first["use"], several)
    assert first["use"]["digest"] == image.digest
    diverged(first["diverge"], hosts, several)
    assert [first["frozen"], second["frozen"]] == [1, 1]  # fetched once, and not once a session
    group = first["group"] + second["group"]
    assert len(group) == 16 and {row[0] for row in group} == hosts
    assert len({tuple(row[1:4]) for row in group}) == 1 and group[0][3] == "ready"
    assert [row[4] for row in group] == [str(n) for n in range(8)] * 2
    handle = facts(folder, "handle")
    assert (scored["answer"], scored["passed"], scored["owner"]) == (
        "42", True, 1234 if several else 0)
    assert (scored["id"], scored["node"]) == (handle["id"], handle["node"])
    assert scored["host"] != first["host"]
    assert scored["closed"] == "its time-to-live of 45 s is over" and scored["closed"] in (
        scored["late"])
    accounted(site, job, image, several)
    site.until(lambda: not site.left_on_nodes(), "all to be gone from the nodes", 60,
               lambda: "\n".join(site.left_on_nodes()[:20]))
    assert not site.left_behind()


def test_scancel_leaves_nothing_of_environments(site: Site, image: MadeImage) -> None:
    """The workers are killed; the epilog of their step removes what users of the image own."""
    job, folder = begin(site, "held", "hold")
    site.until((folder / "up.json").exists, "sessions to be open", 120,
               lambda: site.output("held", job))
    assert facts(folder, "up")["nodes"] == site.cluster.cpu_nodes
    site.cluster.run_as_user(["scancel", job], check=True)
    site.finish("held", job)
    site.until(lambda: not site.left_on_nodes(), "all to be gone from the nodes", 60,
               lambda: "\n".join(site.left_on_nodes()[:20]))


@needs_registry
def test_an_image_is_fetched_once_for_an_allocation(site: Site, image: MadeImage, tmp_path: Path
                                                    ) -> None:
    """By `tangram image pull` in a step over both nodes; sessions then find it in the stores."""
    layer = json.loads(image.manifest)["layers"][0]["digest"]
    found = re.search(r"SlurmctldHost=.*\((.*)\)", site.cluster.conf.read_text())
    assert found is not None
    with registry(tmp_path, address=found[1]) as running:
        running.push("team/env", image, "v1")
        name = f"{running.host}/team/env:v1"
        setup = (f"source {site.venv}/bin/activate; export TANGRAM_IMAGE_STORE=/tmp/images-$USER "
                 f"TANGRAM_IMAGE_INSECURE={running.host}")
        job, folder = begin(site, "pulls", "ready", name, setup=setup)
        site.until(lambda: len(site.info(job).get("nodes", [])) == 2, "both nodes", 90,
                   lambda: site.output("pulls", job))
        told = on_both(site, f"--jobid={job}", f"{setup}; time tangram image pull {name}")
        print(told.stderr)  # how long it took
        assert told.stdout.splitlines() == [f"{image.digest} {name}"] * 2
        assert running.fetched(layer) == 1
        (folder / "pulled").touch()
        seen = site.until(lambda: (folder / "ready.json").exists() and facts(folder, "ready"),
                          "sessions", 120, lambda: site.output("pulls", job))
        print(seen)
        assert seen["nodes"] == site.cluster.cpu_nodes and seen["read"] == ["old\n"] * 2
        assert seen["digests"] == [image.digest] * 2 and running.fetched(layer) == 1
        site.finish("pulls", job)
    assert site.left_on_nodes()  # the stores stay after the job
    on_both(site, "--overlap", f"{setup}; tangram image remove {name} && rm -r /tmp/images-$USER")
    site.until(lambda: not site.left_on_nodes(), "all to be gone from the nodes", 60,
               lambda: "\n".join(site.left_on_nodes()[:20]))


@pytest.mark.timeout(900)
def test_a_whole_debian_is_used_and_forked_on_a_node(
        site: Site, debian: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Each command ends well; what it made has the owners that it named, as far as there are
    several users. Each fork has its own changes and those of before, and no others."""
    several, (suite, image) = "no range" not in request.node.name, debian
    debian_commands.make_package(tmp_path)
    commands = debian_commands.commands(several)
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    folder = site.cluster.home / f"debian-{suite}"
    shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("package"))
    subprocess.run(["chown", "-R", site.cluster.user, folder], check=True)
    job = site.sbatch("debian", f"python trainer_debian.py {folder} {image}", partition="cpu",
                      template="homogeneous", nodes="2", cpus_lent="2", cpus_per_rank="1",
                      mem="2000", mpi="none", gateway="off", time="15")
    said = site.finish("debian", job, 800)
    assert (folder / "debian.json").exists(), said
    told = facts(folder, "debian")
    with capsys.disabled():
        print(f"\n{suite} on {told['node']}, {request.node.callspec.params['site']}: opened in "
              f"{told['opened_s']:.1f} s, snapshot {told['snapshot_s']:.2f} s, "
              f"{len(told['forks'])} forks {told['forks_s']:.2f} s",
              "| command | exit status | owners |", "|---|---|---|",
              *(f"| {row['title']}{' as ' * bool(row['user'])}{row['user']} | {row['status']} | "
                f"{', '.join(row['owners'])} |" for row in told["rows"]), sep="\n")
    assert told["node"] in site.cluster.cpu_nodes and len(told["rows"]) == len(commands)
    for row in told["rows"]:
        assert row["status"] == 0, row
        assert row["isolation"] == f"bwrap+overlay{'+users' * several}+seccomp"
    owned(told["rows"], several)
    changed(told)
    site.until(lambda: not site.left_on_nodes(), "all to be gone from the nodes", 60,
               lambda: "\n".join(site.left_on_nodes()[:20]))


def owned(rows: list[dict[str, Any]], several: bool) -> None:
    """Files have the owners that the commands gave them, or root without several users."""
    owners = dict(line.split() for row in rows for line in row["owners"])
    wanted = {"/testbed/f": "root", "/home/ann/0/0.py": "ann", "/home/ben/7/99.py": "ben",
              "/usr/bin/tt": "ttuser", "/home/bob/x": "bob", "/home/ann/new": "ann"}
    assert {path: owners[path] for path in wanted} == {
        path: f"{name}:{name}" if several else "root:root" for path, name in wanted.items()}


def changed(told: dict[str, Any]) -> None:
    """The snapshot has what was there before, and each of 64 forks its own changes besides."""
    def look(value: str, user: str, line: str) -> str:
        names = "".join(f"{name}\n" for name in sorted(["ann", "ben", "bob", *user.split()]))
        return f"{value}\n{line}\n{names}30001\n"

    assert told["before"] == told["snapshot"] == look("2", "", "x = 0\nx = 2")
    assert told["forks"] == [look(str(n), f"fork{n}", f"x = {n}") for n in range(64)]
    assert told["after"] == look("later", "forklater", "x = later")


def on_both(site: Site, option: str, line: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of the shell in a step with a task on each node."""
    told = site.cluster.run_as_user(
        ["srun", option, "--overlap", "--nodes=2", "--ntasks-per-node=1", "--mpi=none",
         "bash", "-c", line], timeout=120)
    assert told.returncode == 0, told.stderr
    return told


def scorer(site: Site, job: str, folder: Path) -> dict[str, Any]:
    """Runs the scorer in a step of its own, on the node where the killed rank was not."""
    node = facts(folder, "rank1")["host"]
    told = site.cluster.run_as_user(
        ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", f"--nodelist={node}", "--mpi=none",
         str(site.venv / "bin/python"), "trainer_environments.py", "score", str(folder)],
        timeout=180)
    assert told.returncode == 0, told.stderr
    return facts(folder, "scored")


def used(told: dict[str, Any], several: bool) -> None:
    """What the first session did: users, owners, a server, a shell, exit statuses."""
    assert told["useradd"] == "1234\n"
    assert told["bob"] == ("1234" if several else "0") + "\n/home/bob\n"
    owners = {"folder": [0, 0], "mine": [0, 0], "of-bob": [1234, 0], "old": [105, 105],
              "of-bob/f": [1234, 1234]}
    assert told["owners"] == (owners if several else {name: [0, 0] for name in owners})
    assert (told["client"], told["stream"]) == ("got inside\n", "got outside\n")
    assert told["shell"] == "shell in /testbed\n"
    assert told["statuses"] == STATUSES


def diverged(told: dict[str, Any], hosts: set[str], several: bool) -> None:
    """Sessions on both nodes began with the same files, and each kept its own changes."""
    owners = "105:105\n1234:0\n" if several else "0:0\n0:0\n"
    assert {begun for _, begun in told["seen"]} == {f"mine\n1234\n{owners}"}
    assert {node for node, _ in told["seen"][:2]} == {node for node, _ in told["seen"]} == hosts
    assert told["own"] == [f"{n}\nfolder\nmine\nof-bob\nold\nown-{n}\n" for n in range(10)]
    assert set(told["nodes"]) == hosts and told["sessions"] == 10


def accounted(site: Site, job: str, image: MadeImage, several: bool) -> None:
    """Each action is there with its client, its session, its image and its end."""
    rows = site.acct(job)
    clients = Counter(row["client_name"] for row in rows)
    assert set(clients) == {"agent0", "agent1", "scorer"}
    assert {row["image"] for row in rows} == {image.digest}
    assert {row["node"] for row in rows} == set(site.cluster.cpu_nodes)
    assert {row["user"] for row in rows} == {site.cluster.user}
    ways = {row["isolation"] for row in rows if row["kind"] == "exec"}
    assert ways == {f"bwrap+overlay{'+users' * several}+seccomp"}
    assert len([row for row in rows if row["name"] == "setup.sh"]) == 1  # for 16 sessions
    episode = [row for row in rows if row["session_name"] == "episode"]
    assert {row["client_name"] for row in episode} == {"agent0", "scorer"}
    ends = {(row["client_name"], row["name"]): row["state"] for row in episode}
    assert ends["agent0", "sleep"] == "CANCELLED"  # with the rank that was killed
    assert ends["scorer", "test.sh"] == "COMPLETED"
