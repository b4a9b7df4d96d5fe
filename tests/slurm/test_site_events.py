"""Random events of an ordinary site against each template with a running trainer: the job goes on,
starts again or ends in order, nothing is left on any node, and every action has an end.

`EVENTS=13 SEED=1 pytest tests/slurm/test_site_events.py -m "slurm and long"` prints the table;
TEMPLATES=hetjob,satellites takes some templates only, KINDS="down,node reboot" some events only,
and RETURN_TO_SERVICE=0 a site where an administrator has to return nodes that were down.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import REPO, Site, install_for
from sites import site_events
from sites.site_events import COLUMNS, EVENTS, GOES_ON, TEMPLATES, EventJob

SEED, COUNT = int(os.environ.get("SEED", "1")), int(os.environ.get("EVENTS", "13"))
CHOSEN = os.environ.get("TEMPLATES", ",".join(TEMPLATES)).split(",")
KINDS = os.environ.get("KINDS", ",".join(EVENTS)).split(",")
RETURN = int(os.environ.get("RETURN_TO_SERVICE", "2"))
MIB = 64


def test_each_event_comes_as_often_as_any_other() -> None:
    for template in TEMPLATES:
        drawn = site_events.deck(template, 2 * len(EVENTS), SEED)
        assert sorted(drawn) == sorted(2 * list(EVENTS))
        assert drawn == site_events.deck(template, 2 * len(EVENTS), SEED)


@pytest.fixture(scope="module")
def small_home() -> Iterator[Path]:
    """A file system of its own for TANGRAM_HOME, which can be filled."""
    folder = Path(tempfile.mkdtemp(prefix="site-events-", dir="/srv"))
    folder.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MIB}m,mode=0777", "tmpfs", folder],
                   check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def site(small_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    name = f"e{os.getpid()}"
    prefix = f"/tmp/devcluster-{name}"
    with running_cluster(
            tmp_path_factory, name=name, prefix=prefix, netns=True, debian_hosts=True, cpu_nodes=4,
            gpu_nodes=1, trainer_nodes=1, cpus_per_node=16, conf_line=[
                "SlurmdTimeout=90", f"ReturnToService={RETURN}",
                f"Epilog={REPO}/slurm/epilog.d/50-tangram",
                f"AuthInfo=socket={prefix}/munge/munge.sock,cred_expire=10"]) as cluster:
        cluster.run_as_user(f"mkdir -m 700 {small_home}/home && ln -s {small_home}/home .tangram",
                            check=True)
        yield Site(cluster, install_for(cluster))


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """The rows so far; printed as a table at the end."""
    rows: list[tuple[str, ...]] = []
    yield rows
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line("\n| " + " | ".join(COLUMNS) + " |")
    terminal.write_line("|---" * len(COLUMNS) + "|")
    for row in rows:
        terminal.write_line("| " + " | ".join(row) + " |")


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("template", CHOSEN)
def test_events_end_a_job_in_order_or_not_at_all(
        template: str, site: Site, small_home: Path, table: list[tuple[str, ...]]) -> None:
    cards, jobs, wrong = site_events.deck(template, COUNT, SEED, KINDS), 0, list[str]()
    while cards:
        jobs += 1
        name = f"ev{template.replace('-', '')}{jobs}"
        job = EventJob(site, template, name, rng=random.Random(f"{SEED} {name}"), full=small_home,
                       attended=RETURN < 2)
        first = len(table)
        try:
            job.start()
            while cards and len(table) - first < 6:  # a job has its last checks after that
                event = cards.pop(0)
                apply, allowed = EVENTS[event]
                print(time.strftime("%X"), template, event, flush=True)
                table.append((template, event, "no answer", "", "", "", ""))
                apply(job)
                found = job.outcome()
                table[-1] = (template, event, found, "", "", "", "")
                if found not in allowed:
                    wrong.append(f"{template}: {event}: the job {found}: {job.said()[-2000:]}")
                if found != GOES_ON:
                    break
        except AssertionError as error:
            wrong.append(f"{template} {name}: {error}")
        finally:
            wrong += ended(job, table, first)
    assert not wrong, "\n\n".join(wrong)


def ended(job: EventJob, table: list[tuple[str, ...]], first: int) -> list[str]:
    """Ends a job and checks what is left of it; completes the last row. Returns what is wrong."""
    wrong, site = list[str](), job.site
    try:
        job.end()
    except AssertionError as error:
        wrong.append(f"{job.name}: {error}")
    end = time.monotonic() + 40
    while left := site.left_on_nodes() + site_events.cgroups_of(site.cluster.user):
        if time.monotonic() > end:
            break
        time.sleep(1)
    print(time.strftime("%X"), job.name, "left", left, flush=True)
    asked, over, lost = job.counts()
    while lost and time.monotonic() < end + 40:  # a killed broker counts as alive for a minute
        time.sleep(5)
        asked, over, lost = job.counts()
    row = (str(asked), str(over), ", ".join(lost) or "0", str(len(left)))
    if len(table) > first:
        table[-1] = (*table[-1][:3], *row)
    said = job.said()
    wrong += [f"{job.name}: {what}" for what in lost]
    wrong += [f"{job.name} left {left[:10]}"] * bool(left)
    wrong += [f"{job.name} printed {said[-3000:]}"] * ("Traceback" in said)
    return wrong
