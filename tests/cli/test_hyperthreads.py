"""Sizes of job steps on nodes with several CPUs per core. `--exact` gives a job step whole cores,
and of two steps that do not fit together the second would wait silently. The rendered script runs
under a fake srun; a real Slurm is in test_slurm_site_nodes.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.forked_verb import tangram
from test_template import Pretence, pretence  # noqa: F401 - a fixture

from tangram_hpc.cli.template import load, render

# what `scontrol -o show node` says, shortened; Slurm 22.05 to 25.11 have these in this order
NODE = ('echo "NodeName=$4 Arch=x86_64 CoresPerSocket={cores} CPUAlloc=0 CPUEfctv={cpus} '
        'CPUTot={cpus} CPULoad=0.5 Gres=(null) RealMemory=4000 AllocMem=0 Sockets=1 Boards=1"')


def script(template: str = "single-node", **keys: str) -> str:
    return render(load(template), {"trainer": "true", **keys})


def steps(pretence: Pretence, text: str, node_cpus: str, cores: int = 8, cpus: int = 8,  # noqa: F811
          nodes: str = "", **env: str) -> tuple[int, list[str], str, str]:
    """Runs a script on a node with these cores and CPUs, or on `nodes`: its status, the CPUs that
    the srun of the workers got, stdout and stderr."""
    srun = pretence.folder / "bin" / "srun"
    srun.write_text(srun.read_text().replace(
        "#!/bin/bash\n", '#!/bin/bash\necho "srun $*" | head -n 1 >> "$LOG"\n', 1))
    (pretence.folder / "bin" / "scontrol").write_text(
        f"#!/bin/bash\n{nodes or NODE.format(cores=cores, cpus=cpus)}\n")
    status, out, err = pretence.run("", text, SLURM_JOB_CPUS_PER_NODE=node_cpus,
                                    SLURMD_NODENAME="n1", SLURM_JOB_NUM_NODES="1", **env)
    lent = [m[1] for line in pretence.logged() if "worker" in line and line.startswith("srun")
            and (m := re.search(r"--cpus-per-task=(\d+)", line))]
    return status, lent, out, err


@pytest.mark.parametrize(("lent", "rank_cpus", "node", "takes"), [
    ("5", "1", "8", "4"),  # of 5 + 3 the ranks hold 4
    ("5", "1", "12", "6"),  # there is room for what Slurm gives anyway
    ("4", "1", "8", "4"), ("7", "3", "16", "4"),  # a rank of 3 CPUs has 2 cores
])
def test_lent_cpus_are_rounded_to_whole_cores_with_one_line(
        pretence: Pretence, lent: str, rank_cpus: str, node: str, takes: str) -> None:  # noqa: F811
    text = script(cpus_lent=lent, ranks="2", cpus_per_rank=rank_cpus)
    status, found, out, err = steps(pretence, text, node, cores=8, cpus=16)
    assert (status, found, err) == (0, [takes], "")
    told = [line for line in out.splitlines() if "a step has whole cores" in line]
    assert len(told) == 1 and f"{takes} are lent (cpus_lent={lent})" in told[0], out


@pytest.mark.parametrize("first", [1, 2])
def test_lent_cpus_are_whole_cores_on_nodes_whose_cores_differ(
        pretence: Pretence, first: int) -> None:  # noqa: F811
    """Each node gets steps of the same size, so the largest core counts, whichever is first."""
    nodes = "\n".join(NODE.replace("$4", f"n{number}").format(cores=8, cpus=8 * core)
                      for number, core in ((1, first), (2, 3 - first)))
    text = script("homogeneous", cpus_lent="3", ranks="2", gateway="off", partition="")
    status, found, out, err = steps(pretence, text, "4(x2)", nodes=nodes)
    assert (status, found, err) == (0, ["2"], "")
    assert out.startswith(f"tangram: a core of n{3 - first} is 2 CPUs"), out


def test_lent_cpus_are_not_rounded_where_a_core_is_one_cpu(pretence: Pretence) -> None:  # noqa: F811
    text = script(cpus_lent="5", ranks="2")
    assert steps(pretence, text, "8", cores=8, cpus=8) == (0, ["5"], "", "")


@pytest.mark.parametrize(("ranks", "node", "takes"), [("2", "4", "2"), ("4", "5", "1")])
def test_a_job_with_fewer_nodes_than_it_was_rendered_for_keeps_cpus_for_all_ranks(
        pretence: Pretence, ranks: str, node: str, takes: str) -> None:  # noqa: F811
    """As by `sbatch --nodes=1`: without CPUs the ranks' step waited for that of the workers."""
    text = script("homogeneous", cpus_lent="3", ranks=ranks, nodes="2", gateway="off", partition="")
    status, found, out, err = steps(pretence, text, node)
    assert (status, found, err) == (0, [takes], "")
    assert out == (f"tangram: of {node} CPUs on each node {takes} are lent (cpus_lent=3) and the "
                   f"ranks hold {ranks} (they asked for {ranks}, and sacct counts these)\n")


def test_a_job_without_a_cpu_to_lend_names_no_cores_of_one_cpu(pretence: Pretence) -> None:  # noqa: F811
    status, found, _, err = steps(pretence, script(cpus_lent="1", ranks="1", gateway="off"), "1")
    assert (status, found) == (2, []) and "with more nodes or CPUs" in err and "core" not in err


def test_a_job_that_uses_one_thread_of_each_core_counts_cores(pretence: Pretence) -> None:  # noqa: F811
    """As with `sbatch --hint=nomultithread`: Slurm then gives 3 cores for 3 CPUs."""
    text = script(cpus_lent="2", ranks="1", gateway="off")
    assert steps(pretence, text, "3", cores=4, cpus=8, SLURM_THREADS_PER_CORE="1") == (
        0, ["2"], "", "")


@pytest.mark.parametrize(("node", "env", "told"), [
    ("16", {}, "6 are lent, the ranks hold 4, and 6 are left over; `-o cpus_lent=12` "),
    ("32,16(x2)", {}, "and 6 are left over; `-o cpus_lent=12` "),  # one size for all nodes
    ("10", {}, ""),
    ("11", {}, ""),  # the rest of a core
    ("16", {"TANGRAM_CPUS": "12"}, ""),  # a setting lends more than the step has
    ("16", {"SLURM_THREADS_PER_CORE": "1"}, "")])  # CPUs may be cores or threads
@pytest.mark.parametrize("template", ["single-node", "homogeneous"])
def test_cpus_that_slurm_gave_beyond_the_request_are_told_in_one_line(
        pretence: Pretence, template: str, node: str, env: dict[str, str], told: str) -> None:  # noqa: F811
    """As on partitions that give whole nodes, or where memory costs CPUs (MaxMemPerCPU)."""
    text = script(template, cpus_lent="6", ranks="2", cpus_per_rank="2", gateway="off",
                  partition="", **({"nodes": "1"} if template == "homogeneous" else {}))
    status, found, out, err = steps(pretence, text, node, cores=8, cpus=16, **env)
    assert (status, found, err) == (0, ["6"], "")
    assert out.count("\n") == bool(told) and told in out


@pytest.mark.parametrize(("step", "env", "told"), [
    ("6", {}, "tangram: Slurm gave component cpu 16 CPUs on each node: 6 are lent, and 10 are left "
     "over; cpus_cpu=16 lends these too\n"),
    ("16", {}, ""), ("", {}, ""), ("6", {"TANGRAM_CPUS": "16"}, ""),
    ("6", {"SLURM_HINT": "nomultithread"}, "")])
def test_cpus_of_a_component_beyond_its_step_are_told_in_one_line(
        pretence: Pretence, step: str, env: dict[str, str], told: str) -> None:  # noqa: F811
    text = script("hetjob", ranks="2", cpus_cpu="5", partition_cpu="", partition_gpu="",
                  partition_trainer="")
    status, out, err = pretence.run(
        "", text, SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0="32,16(x2)", SLURM_CPUS_ON_NODE=step,
        SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1="64", **env)
    assert (status, err) == (0, "") and out == told


@pytest.mark.parametrize(("mem", "told"), [
    ("0", None), ("500", "500"), ("500M", "500"), ("64G", "65536"), ("1t", "1048576"),
    ("2048K", "2")])
@pytest.mark.parametrize("template", ["single-node", "homogeneous"])
def test_workers_are_told_the_memory_of_their_step(
        pretence: Pretence, template: str, mem: str, told: str | None) -> None:  # noqa: F811
    """By `srun --mem` alone they would take the job's memory for theirs."""
    text = script(template, mem_lent=mem, ranks="2", gateway="off", partition="")
    status, _, _, err = steps(pretence, text, "16", cores=16, cpus=16)
    assert (status, err) == (0, "")
    line = next(line for line in pretence.logged() if "--job-name=workers" in line)
    found = re.search(r" env (SLURM_MEM_PER_NODE=(\d+) )?bash ", line)
    assert f" --mem={mem} " in line and found is not None and found[2] == told


def test_job_steps_that_cannot_fit_together_are_refused_in_one_line(pretence: Pretence) -> None:  # noqa: F811
    """Three ranks of 3 CPUs hold all 12 CPUs, so that none could be lent."""
    text = script(cpus_lent="1", ranks="2", cpus_per_rank="3")
    status, found, _, err = steps(pretence, text, "10(x2),12", cores=8, cpus=16)
    assert (status, found) == (2, []) and err.count("\n") == 1
    assert "cpus_lent=1" in err and "threads_per_core=2" in err and "tangram broker" not in str(
        pretence.logged())


@pytest.mark.parametrize("template", ["single-node", "homogeneous"])
def test_a_job_rendered_for_hyperthreads_requests_whole_cores(template: str) -> None:
    keys = {"cpus_lent": "5", "ranks": "2", "nodes": "1"}
    if template == "single-node":
        del keys["nodes"]
    text = script(template, **keys, threads_per_core="2")
    assert "#SBATCH --cpus-per-task=10 " in text  # 6 + 4
    assert "#SBATCH --cpus-per-task=8 " in script(template, **keys)


@pytest.mark.parametrize(("words", "keys", "status"), [
    ((), {}, 0), (("--threads-per-core", "2"), {}, 2), (("--threads-per-core", "1"), {}, 0),
    ((), {"threads_per_core": "2"}, 0), (("--threads-per-core", "4"), {}, 2),
])
def test_check_refuses_steps_that_do_not_fit(tmp_path: Path, words: tuple[str, ...],
                                             keys: dict[str, str], status: int) -> None:
    """Steps of 5 and 3 CPUs. Without information about the nodes the message is a warning."""
    job = tmp_path / "job.sbatch"
    job.write_text(script(cpus_lent="5", ranks="2", **keys))
    told = tangram("template", "check", *words, job)
    assert told.returncode == status, told.stderr
    assert told.stderr.count("\n") == ((not words and not keys) or status == 2)
    assert "whole cores" in told.stderr or not told.stderr


def test_template_check_is_silent_when_all_job_steps_fit(tmp_path: Path) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text(script())
    told = tangram("template", "check", job)
    assert (told.returncode, told.stderr) == (0, "")


def test_check_refuses_a_negative_number_of_threads(tmp_path: Path) -> None:
    """It passed every script."""
    job = tmp_path / "job.sbatch"
    job.write_text(script(cpus_lent="5", ranks="2"))
    told = tangram("template", "check", "--threads-per-core=-2", job)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert "--threads-per-core -2: it is a number of CPUs" in told.stderr
