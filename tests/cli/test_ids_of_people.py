"""Each verb that takes a job or an action accepts every id that `tangram acct` prints, and sacct's
forms of a job id; a wrong id is refused with the verb's own usage."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import forked_verb
from helpers.cluster_parts import environ_of, home_of

import tangram_hpc
from tangram_hpc import LocalCluster

JOB = "4711"  # a job of Slurm's has such a number


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=1, home=tmp_path_factory.mktemp("home"), job=JOB, warm=0) as cluster:
        for word in ("one", "two"):
            assert cluster.submit(["echo", word], name=word).result().ok
        yield cluster


def tangram(cluster: LocalCluster, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TANGRAM_", "SLURM_"))}
    home = environ_of(cluster)["TANGRAM_HOME"]
    return forked_verb.tangram(*words, env={**environ, "TANGRAM_HOME": home})


@pytest.fixture(scope="module")
def printed(cluster: LocalCluster) -> list[str]:
    """The ids that `acct` prints, in the order in which the actions were submitted."""
    told = tangram(cluster, "acct", "-j", JOB, "-n", "-P", "-o", "JobID")
    assert told.returncode == 0, told.stderr
    return told.stdout.split()


def test_tangram_acct_accepts_the_ids_that_it_prints(
        cluster: LocalCluster, printed: list[str]) -> None:
    """One id gives one row, several ids give theirs, and an unknown id is an error."""
    first, second = printed[:2]
    assert first.startswith(f"{JOB}.")
    told = tangram(cluster, "acct", "-j", first, "-n", "-P", "-o", "JobID,JobName")
    assert (told.stdout, told.stderr) == (f"{first}|one\n", "")
    told = tangram(cluster, "acct", "-j", f"{first},{second}", "-n", "-P", "-o", "JobID")
    assert told.stdout.split() == [first, second]
    told = tangram(cluster, "acct", "-j", f"{JOB}.9.9")
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert f"job {JOB} had no action 9.9" in told.stderr


def test_tangram_explain_accepts_the_ids_that_acct_prints(
        cluster: LocalCluster, printed: list[str]) -> None:
    """With the job in the id, with the job in --job, and not with another job."""
    first = printed[0]
    short = first.removeprefix(f"{JOB}.")
    for words in ((first,), ("-j", JOB, first), ("-j", first, first), ("-j", JOB, short)):
        told = tangram(cluster, "explain", *words)
        assert told.returncode == 0 and told.stdout.startswith(f"{short} one  COMPLETED"), told
    told = tangram(cluster, "explain", "-j", "5", first)
    assert told.returncode == 2 and f"belongs to job {JOB}, but --job is 5" in told.stderr


def test_tangram_explain_accepts_job_ids_with_a_cluster_name(tmp_path: Path) -> None:
    """`explain -j JOB@CLUSTER` accepts ids of the job that name no cluster. When the job is over,
    an action that it did not have is told as such.
    """
    with LocalCluster(cpus=1, home=tmp_path, job=f"{JOB}@here", warm=0) as other:
        assert other.submit(["true"], name="three").result().ok
        rows = tangram(other, "acct", "-j", f"{JOB}@here", "-n", "-P", "-o", "JobID").stdout
        short = rows.split()[0].removeprefix(f"{JOB}@here.")
        told = tangram(other, "explain", "-j", f"{JOB}@here", f"{JOB}.{short}")
        assert told.returncode == 0 and "three  COMPLETED" in told.stdout, told
        told = tangram(other, "explain", "-j", "5@here", f"{JOB}.{short}")
        assert told.returncode == 2 and "--job is 5@here" in told.stderr, told
    told = tangram(other, "explain", "-j", f"{JOB}@here", "9.9")
    assert told.returncode == 2, told
    assert f"job {JOB}@here had no action 9.9; `tangram acct -j {JOB}@here`" in told.stderr


@pytest.mark.parametrize("form", ["{job}", "{job}+1", "{job}.0", "{job}.batch", "{job}+1.extern",
                                  "{job}.het+1", "{first}"])
def test_each_form_of_a_jobs_id_names_the_job(cluster: LocalCluster, printed: list[str],
                                              form: str) -> None:
    """sacct's forms and those of acct itself, for the verbs that ask a running job."""
    named = form.format(job=JOB, first=printed[0])
    told = tangram(cluster, "info", "-j", named)
    assert told.returncode == 0 and told.stdout.startswith(f"job {JOB} "), told
    told = tangram(cluster, "run", "-j", named, "--", "echo", "hello")
    assert (told.returncode, told.stdout) == (0, "hello\n"), told
    told = tangram(cluster, "acct", "-j", named, "-n", "-P", "-o", "JobName")
    assert told.stdout.startswith("one\n"), told


def test_tangram_acct_accepts_several_job_ids(cluster: LocalCluster, tmp_path: Path) -> None:
    """`acct -j 1,2` prints the rows of both jobs, as sacct does."""
    home = home_of(cluster)
    with tangram_hpc.LocalCluster(cpus=1, home=home, job="4712", warm=0) as other:
        assert other.submit(["true"], name="three").result().ok
    told = tangram(cluster, "acct", "-j", f"{JOB},4712+0", "-n", "-P", "-o", "JobName")
    assert set(told.stdout.split()) >= {"one", "two", "three"}, told
    told = tangram(cluster, "acct", "--held", "-j", f"{JOB},4712")
    assert told.returncode == 2 and "take one job" in told.stderr


@pytest.mark.parametrize(("words", "said"), [
    (("acct", "-j", "4711\n4712"), "'4711\\n4712' holds a line break"),
    (("shutdown", "-j", "4711\n4712"), "holds a line break; name one job"),
    (("export", "metrics", "-j", ""), "'' names no job"),
    (("journal", "check", "-j", ""), "'' names no job"),
    (("acct", "-j", "209_1"), "sacct -X -n -j 209_1 -o JobIDRaw"),
    (("acct", "-j", ""), "'' names no job"), (("acct", "-j", ","), "',' names no job"),
    (("shutdown", "-j", ""), "'' names no job"), (("shutdown", "-j", " "), "' ' names no job"),
    (("info", "-j", ""), "'' names no job"), (("top", "-j", ""), "'' names no job"),
    (("top", ""), "'' names no job"), (("queue", ""), "'' names no job"),
    (("report", ""), "'' names no job"), (("run", "-j", "", "true"), "'' names no job"),
    (("rank", "-j", "", "true"), "'' names no job"), (("worker", "-j", ""), "'' names no job"),
    (("explain", "-j", "", "1.1"), "'' names no job"),
    (("logs", "-j", "", "1.1"), "'' names no job"),
    *((("acct", option, ""), "'' names nothing; leave the option out to choose all")
      for option in ("-S", "-E", "-s", "-u", "-A", "-N", "-r", "--name")),
    *((("queue", option, ""), "'' names nothing") for option in ("-t", "-n", "-u", "-w", "-p")),
    *((("info", option, " ,"), "' ,' names nothing") for option in ("-n", "-p", "-t")),
    (("info", "-j", "209_[1-4]"), "is a task of a job array"),
    (("explain", "seventeen"), "write CLIENT.NUMBER"),
    (("acct", "--jbos", "4711"), "unrecognized arguments: --jbos"),
    (("template", "check", "job", "--hard"), "unrecognized arguments: --hard")])
def test_a_wrong_id_is_refused_with_the_usage_of_the_verb(
        cluster: LocalCluster, words: tuple[str, ...], said: str) -> None:
    """The usage is that of the called verb, and one line names the remedy. An empty value, such as
    that of a shell variable that is not set, does not mean everything."""
    told = tangram(cluster, *words)
    verb = " ".join(words[:2]) if words[0] in ("template", "export", "journal") else words[0]
    assert told.returncode == 2 and told.stderr.startswith(f"usage: tangram {verb} "), told.stderr
    assert said in told.stderr.splitlines()[-1]


def test_a_gpu_request_on_a_cluster_without_gpus_names_gpus_and_not_trust(
        cluster: LocalCluster) -> None:
    """Trusting the code would not help, so the error does not advise it."""
    for trusted in (False, True):
        with pytest.raises(tangram_hpc.InfeasibleRequest) as error:
            cluster.submit(["true"], gpus=1, trusted=trusted).result()
        assert "gpus: 1 asked for, the largest node has 0" in str(error.value)
        assert "trusted=True" not in str(error.value) and "`devices`" in str(error.value)
