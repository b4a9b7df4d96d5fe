"""`tangram template`, and the rendered script itself under a fake srun: no Slurm is needed."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers import forked_verb
from helpers.cluster_parts import until

from tangram_hpc.cli.template import left_open, load, render
from tangram_hpc.errors import InvalidInput

REPO = Path(__file__).resolve().parents[2]
NAMES = ("hetjob", "homogeneous", "replay", "satellite", "satellites", "single-node")
FULL = {"partition_cpu": "c", "partition_gpu": "g", "partition_trainer": "t",
        "trainer": "python train.py --lr 1"}
COMPUTED = {"tasks_trainer", "tasks_node", "ranks_node", "cpus_node"}  # from ranks, nodes, CPUs


def directives(text: str) -> list[str]:
    """The script's `#SBATCH` lines as sbatch takes them: without what follows a #."""
    return [line[8:].partition("#")[0].strip() for line in text.splitlines()
            if line.startswith("#SBATCH ")]


def tangram(*words: str) -> subprocess.CompletedProcess[str]:
    return forked_verb.tangram("template", *words)


# ---- rendering ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_placeholder_has_a_key_and_every_key_is_used(name: str) -> None:
    template = load(name)
    live = [line for line in template.text.splitlines()
            if not line.startswith("#") or line.startswith("#SBATCH")]
    found = {word.lower() for line in live for word in re.findall("<([A-Z][A-Z_]+)>", line)}
    used = found - COMPUTED
    assert used == set(template.keys) - {"ranks", "nodes_trainer"} | (used & {"nodes_trainer"})
    assert template.about and "#+" not in template.text
    assert {p[1:-1].lower() for p in left_open(template.text)} == found, "a raw one does not pass"


def test_what_is_computed_from_keys_is_a_placeholder_for_render_and_for_the_script() -> None:
    computed = {each for name in NAMES for each in load(name).values({}).keys() - load(name).keys}
    assert computed == COMPUTED
    script = (REPO / "sbatch_templates" / "_begin.sh").read_text()
    assert "|".join(["TASKS_TRAINER", "TASKS_NODE", "RANKS_NODE", "CPUS_NODE"]) in script


@pytest.mark.parametrize("name", NAMES)
def test_every_sbatch_directive_says_whether_it_is_required(name: str) -> None:
    lines = [line for line in load(name).text.splitlines() if line.startswith("#SBATCH ")]
    said = [line for line in lines if "# required" in line or "# optional" in line]
    assert len(lines) > 10 and set(lines) - set(said) <= {"#SBATCH hetjob"}
    for key, about in load(name).keys.items():  # what says optional can be dropped, and only it
        mine = [line for line in lines if f"<{key.upper()}>" in line]
        if about.optional and mine:
            assert all("# optional" in line for line in mine), key


@pytest.mark.parametrize("name", NAMES)
def test_each_template_renders_into_a_complete_script(name: str, tmp_path: Path) -> None:
    """Optional keys are left empty or given; bash can parse the script; it requests a warning
    signal."""
    keys = load(name).keys
    least = {k: "" if v.optional else v.default or "9" for k, v in keys.items()}
    for given in (least, {k: least[k] or "7" for k in keys}):
        text = render(load(name), given)
        assert left_open(text) == []
        script = tmp_path / "job.sbatch"
        script.write_text(text)
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        told = directives(text)
        assert {"--output=%x-%j.out", "--open-mode=append", "--requeue"} <= set(told)
        assert f"--signal=B:USR1@{least['warn']}" in told
    assert not any("=" in word and not word.partition("=")[2] for word in told)


def test_computed_template_values_follow_from_other_keys() -> None:
    """A gateway is one more rank; each node has equally many ranks, and the gateway is the last
    one."""
    values = load("homogeneous").values
    got = values({"nodes": "2", "ranks": "16", "cpus_per_rank": "3", "cpus_lent": "10"})
    assert [got[k] for k in ("tasks_trainer", "tasks_node", "ranks_node", "cpus_node")] == [
        "17", "9", "8", "37"]
    got = values({"nodes": "2", "ranks": "16", "gateway": "off"})
    assert [got[k] for k in ("tasks_trainer", "tasks_node", "cpus_node")] == ["16", "8", "16"]
    assert load("hetjob").values({"nodes_trainer": "4", "ranks": "32"})["ranks_node"] == "8"


def test_rendering_fills_in_values_and_drops_empty_optional_lines(tmp_path: Path) -> None:
    text = render(load("hetjob"), {**FULL, "account": "mine", "ranks": "8", "gres_gpu": "",
                                   "partition_gpu": ""})
    assert left_open(text) == []
    told = directives(text)
    assert told.count("hetjob") == 2 and "--output=%x-%j.out" in told
    cpu, gpu = told[: told.index("hetjob")], told[told.index("hetjob") + 1 :]
    assert "--account=mine" in cpu and "--partition=c" in cpu and "--no-kill" in cpu
    assert not any(word.startswith(("--qos", "--mem", "--gres", "--partition=g")) for word in told)
    assert "--partition=t" in gpu and "--ntasks=9" in gpu and "TANGRAM_WORLD_SIZE=9" in text
    assert "--ntasks-per-node=9" in gpu and "--distribution=plane=8" in text
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert left_open(render(load("hetjob"), {})) == [
        "<PARTITION_CPU>", "<PARTITION_GPU>", "<PARTITION_TRAINER>", "<TRAINER>"]


def test_whole_numbers_are_rendered_without_leading_zeros() -> None:
    """bash takes 090 for an octal number: the job's end failed where it counts to `warn`."""
    text = render(load("single-node"), {"warn": "090", "cpus_lent": "08", "ranks": "02",
                                        "requeues": "00", "cpus_per_rank": "09", "trainer": "x"})
    assert "n < 90;" in text and "--signal=B:USR1@90" in directives(text)
    assert "lent_cpus=8 node_ranks=3 rank_cpus=9" in text and '"$start" -lt 0 ]' in text
    assert load("hetjob").cautions({"nodes_cpu": "01"}) == load("hetjob").cautions(
        {"nodes_cpu": "1"}) != []


@pytest.mark.parametrize(("given", "told"), [
    ({"partition_cpus": "x"}, "did you mean 'partition_cpu'"),
    ({"zzz": "1"}, "tangram template show hetjob"),
    ({"ranks": "0"}, "ranks='0' must be a whole number"),
    ({"nodes_cpu": "two"}, "nodes_cpu='two' must be a whole number"),
    ({"cpus_per_rank": ""}, "cpus_per_rank is not optional"),
    ({"trainer": " "}, "trainer is not optional"),
    ({"gateway": "maybe"}, "gateway='maybe' must be on or off"),
    ({"requeues": "-1"}, "requeues='-1' must be a whole number"),
    ({"time": "1hour"}, "time='1hour' is no time limit of Slurm; write MINUTES"),
    ({"time": "1.5"}, "time='1.5' is no time limit of Slurm"),
    ({"placer": "xyz"}, "placer='xyz': placer 'xyz' is not known; choose one of elastic"),
    ({"placer": "fcfs"}, "placer='fcfs': placer 'fcfs': write fcfs:K"),
    ({"partition_cpu": "a b"}, "partition_cpu='a b': its value must not contain ' '"),
    ({"job_name": "x\nreboot"}, "must not contain"),
    ({"job_name": "a/b"}, "job_name='a/b': its value must not contain '/'"),
    ({"scratch": "/it's"}, "must not contain")])
def test_wrong_template_keys_are_refused_with_a_suggestion(
        given: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        render(load("hetjob"), given)


def test_shell_values_are_rendered_unchanged() -> None:
    given = {"trainer": "a 'b' \"$C\" | d; e", "setup": "x && y", "broker_options": "--max-nodes 8",
             "scratch": "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/$USER x"}
    text = render(load("hetjob"), given)
    assert all(value in text for value in given.values())


def test_tangram_template_lists_shows_and_refuses_wrong_arguments(tmp_path: Path) -> None:
    assert [line.split()[0] for line in tangram("list").stdout.splitlines()] == list(NAMES)
    assert tangram("show", "hetjob").stdout == load("hetjob").text
    job = tmp_path / "job.sbatch"
    for words, said in ((("show", "nope"), "known are hetjob, homogeneous"),
                        (("show", "../setup"), "known are hetjob, homogeneous"),
                        (("render", "hetjob", "--strict"), "<TRAINER>"),
                        (("render", "hetjob", "-o", "ranks"), "KEY=VALUE"),
                        (("render", "hetjob", "-o", "rank=1"), "did you mean 'ranks'"),
                        (("render", "hetjob", "--output", str(tmp_path / "no" / "file")),
                         "No such file"),
                        (("check", str(tmp_path / "none")), "No such file")):
        told = tangram(*words)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1) and said in told.stderr
    options = [word for key, value in FULL.items() for word in ("-o", f"{key}={value}")]
    told = tangram("render", "hetjob", *options[2:], "--output", str(job))
    assert told.returncode == 0 and told.stdout == ""
    assert told.stderr.count("\n") == 1 and "warning" in told.stderr
    assert "<PARTITION_CPU>" in told.stderr
    told = tangram("check", str(job))
    assert (told.returncode, told.stderr.count("\n")) == (2, 1) and str(job) in told.stderr
    told = tangram("render", "hetjob", *options, "--strict", "--output", str(job))
    assert (told.returncode, told.stderr) == (0, "")
    assert tangram("check", str(job)).returncode == 0


def test_one_node_in_component_0_gives_a_warning() -> None:
    """One node is allowed, and the message says what follows from it."""
    options = [word for key, value in FULL.items() for word in ("-o", f"{key}={value}")]
    told = tangram("render", "hetjob", *options, "--strict", "-o", "nodes_cpu=1")
    assert told.returncode == 0 and "#SBATCH --nodes=1" in told.stdout
    assert told.stderr.count("\n") == 1 and "warning" in told.stderr
    assert "nodes_cpu=1" in told.stderr and "ends the whole job" in told.stderr


@pytest.mark.parametrize(("limit", "warn", "warned"), [
    ("2", "120", True), ("3:00", "120", True), ("3", "119", False), ("0-1", "3600", True),
    ("01:00:00", "120", False), ("UNLIMITED", "120", False), ("0", "120", False)])
def test_a_limit_that_leaves_no_time_for_work_gives_a_warning(
        limit: str, warn: str, warned: bool) -> None:
    cautions = load("single-node").cautions({"trainer": "x", "time": limit, "warn": warn})
    assert [f"time={limit}: the job begins to end warn={warn} s" in c for c in cautions] == (
        [True] * warned)


def test_an_mpi_that_only_the_site_can_know_is_a_warning() -> None:
    for mpi, warned in (("abc", 1), ("pmi", 1), ("pmix_v5", 0), ("pmi2", 0)):
        cautions = load("single-node").cautions({"trainer": "x", "mpi": mpi})
        assert [c for c in cautions if f"mpi={mpi}: " in c and "srun --mpi=list" in c] == (
            cautions) and len(cautions) == warned


@pytest.mark.parametrize("limit", ["60", "0", "1:30:00", "1-12", "2-0:30:00", "UNLIMITED"])
def test_a_time_limit_of_slurm_is_taken(limit: str) -> None:
    assert f"--time={limit}" in directives(render(load("single-node"), {"time": limit}))


@pytest.mark.parametrize(("name", "key", "value", "told"), [
    ("satellite", "broker", "abc", "must be the number of the broker's job"),
    ("satellite", "broker", "0", "must be the number of the broker's job"),
    ("replay", "policy", "elastic:9", "policy='elastic:9': placer 'elastic:9': write elastic")])
def test_values_that_other_programs_would_refuse_later_are_refused(
        name: str, key: str, value: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        render(load(name), {key: value})


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_wheel_brings_the_templates_and_the_files_of_a_site(tmp_path: Path) -> None:
    tree, venv = tmp_path / "tree", tmp_path / "venv"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tree)
    for name in ("tangram_hpc", "sbatch_templates", "slurm"):
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, tree], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name  # for any Python
    names = zipfile.ZipFile(wheel).namelist()
    assert any(n.endswith("demo/data/mutants.json") for n in names)
    assert not any(n.startswith("tests/") for n in names)
    shutil.rmtree(tree)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    subprocess.run([*pip, "--python", venv / "bin" / "python", "install", "--no-deps", wheel],
                   check=True)
    told = subprocess.run([venv / "bin" / "tangram", "template", "show", "hetjob"], cwd=tmp_path,
                          capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == load("hetjob").text
    subprocess.run([venv / "bin" / "tangram", "site", "files", "site"], cwd=tmp_path, check=True)
    epilog = Path("epilog.d/50-tangram")
    assert (tmp_path / "site" / epilog).read_bytes() == (REPO / "slurm" / epilog).read_bytes()
    assert os.access(tmp_path / "site" / epilog, os.X_OK)


# ---- the script under a pretended srun -----------------------------------------------------------

TANGRAM = """\
#!/bin/bash
echo "tangram $*" >> "$LOG"
job="$TANGRAM_HOME/jobs/$SLURM_JOB_ID"
case "$1" in
  broker)
    [ -z "${BROKER_FAILS:-}" ] || { echo "tangram: error: config field" >&2; exit 2; }
    trap 'echo "broker ended" >> "$LOG"; touch "$job/ended"; exit 0' TERM
    trap 'echo "broker drained" >> "$LOG"' USR1
    socket="$TMPDIR/tangram-broker-job7-x"
    mkdir -p "$job" "$socket"; exec 9> "$socket/.alive"; flock 9  # it leaves its folder behind
    echo "{\\"addresses\\": [\\"unix:$socket/broker.sock\\", \\"tls:n:1#2\\"]}" > "$job/access.json"
    while :; do sleep 0.05; done ;;
  config) echo "cpus             ${TANGRAM_CPUS:-0}                        default" ;;
  worker) touch "$TANGRAM_SCRATCH/left"; until [ -e "$job/ended" ]; do sleep 0.05; done ;;
  rank)
    while [ "$1" != -- ]; do [[ $1 != --step-file=* ]] || file="${1#*=}"; shift; done
    if [ "$SLURM_PROCID" -eq "$((TANGRAM_WORLD_SIZE - 1))" ]; then
        echo "gateway of $TANGRAM_WORLD_SIZE" >> "$LOG"; exit
    fi
    echo "$SLURM_STEP_ID" > "$file"; shift; exec "$@" ;;
esac
"""
SRUN = """\
#!/bin/bash
export SLURMD_NODENAME="node$1" SLURM_STEP_ID=5 SLURM_PROCID=0
words=("$@")
for word; do [[ $word != --task-epilog=* ]] || epilog="${word#*=}"; done
while [ "${words[0]#-}" != "${words[0]}" ]; do words=("${words[@]:1}"); done
[ "$1" != --het-group=2 ] || SLURM_PROCID=2 "${words[@]}"        # the gateway, then a rank
"${words[@]}" &
task=$!
[ "$1" != --het-group=2 ] || echo "$task" > "$LOG.pid"
trap 'echo "srun ended" >> "$LOG"; kill -9 "$task"; wait "$task"; ${epilog:-:}; exit 143' TERM
status=0
wait "$task" || status=$?
${epilog:-:}
[ -z "${epilog:-}" ] || echo "$1" >> "$LOG.epilogs"
exit "$status"
"""
SCANCEL = """\
#!/bin/bash
echo "scancel $*" >> "$LOG"
# as of Slurm 22.05 while a later job waits: a step is signalled twice, each time after a question
for answer in y y; do
    [[ $* != *" --interactive "* ]] || { echo "Cancel step_id=$*? "; read -r answer; }
    [ "$answer" != y ] || kill -TERM "$(cat "$LOG.pid")"
    sleep 0.3
done
"""
SIGNALLED = "scancel --quiet --ctld --interactive --signal=TERM"
SCONTROL = """\
#!/bin/bash
echo "scontrol $*" >> "$LOG"
[ -z "${RESTARTS:-}" ] || echo "JobId=7 Requeue=1 Restarts=$RESTARTS BatchFlag=1 CPUs/Task=4" \
    "ReqB:S:C:T=0:0:*:${THREADS:-*} TRES=cpu=4,mem=600M,node=1 MinMemoryNode=600M MinTmpDiskNode=0"
"""


class Pretence:
    """A rendered script, with fake commands in the place of Slurm's and tangram's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.scratch = folder, folder / "log", folder / "scratch"
        (folder / "bin").mkdir()
        for name, text in (("tangram", TANGRAM), ("srun", SRUN), ("scancel", SCANCEL),
                           ("scontrol", SCONTROL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, trainer: str, text: str = "", stdout: Any = subprocess.PIPE, **env: str
              ) -> subprocess.Popen[str]:
        """Starts the script as Slurm would."""
        script = self.folder / "job.sbatch"
        script.write_text(text or render(load("hetjob"), {**FULL, "trainer": trainer}))
        self.scratch.mkdir(exist_ok=True)
        environ = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": str(self.folder),
                   "LOG": str(self.log), "TMPDIR": str(self.scratch), "SLURM_JOB_ID": "7",
                   "SLURM_HET_SIZE": "3", "SLURM_JOB_ID_HET_GROUP_0": "7",
                   "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_JOB_ID_HET_GROUP_2": "9",
                   "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
                   "SLURM_JOB_END_TIME": "4000000000",
                   **env}
        return subprocess.Popen(["bash", str(script)], env=environ, stdout=stdout,
                                stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)

    def run(self, trainer: str, text: str = "", **env: str) -> tuple[int, str, str]:
        """Runs it to its end: status, stdout, stderr."""
        child = self.start(trainer, text, **env)
        out, err = child.communicate(timeout=60)
        return child.returncode, out, err

    def logged(self) -> list[str]:
        """The commands that were called, in order."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def ends(self) -> list[str]:
        """The log's lines about processes that ended or were cancelled, in order."""
        return [line for line in self.logged() if line.endswith("ended") or "scancel" in line]


@pytest.fixture
def pretence(tmp_path: Path) -> Pretence:
    return Pretence(tmp_path)


def test_the_job_script_starts_and_ends_broker_workers_gateway_and_trainer(
        pretence: Pretence) -> None:
    trainer = """python3 -c 'import sys; print("it'"'"'s", "$5 & more"); sys.exit(7)'"""
    status, out, err = pretence.run(trainer)
    assert (status, out, err) == (7, "it's $5 & more\n", "")  # its quotes are its own
    told = pretence.logged()
    assert told[0] == "tangram broker --restarts 5 --placer elastic --nodes 3"
    assert set(told[1:-1]) == {
        "tangram worker --component cpu --het-group 0",
        "tangram worker --component gpu --het-group 1", "gateway of 3",
        "scontrol -o show job 7",  # whether the job is being preempted
        *(t for t in told if t.startswith("tangram rank"))}
    assert sum(t.startswith("tangram rank --gateway=on --step-file=") for t in told) == 2
    assert told[-1] == "broker ended"
    assert list(pretence.scratch.iterdir()) == []  # the epilog was there


def test_a_step_goes_on_when_one_of_its_tasks_has_ended(pretence: Pretence) -> None:
    """Whatever `WaitTime` and `KillOnBadExit` the site has set."""
    srun = pretence.folder / "bin" / "srun"
    srun.write_text(SRUN.replace("words=", 'echo "${*//$'"'\\n'"'/ }" >> "$LOG.srun"\nwords=', 1))
    assert pretence.run("true")[0] == 0
    steps = Path(f"{pretence.log}.srun").read_text().splitlines()
    assert len(steps) == 3
    for step in steps:
        assert {"--wait=0", "--kill-on-bad-exit=0"} <= set(step.split())


@pytest.mark.parametrize(("name", "told", "end", "status", "lost"), [
    ("hetjob", "JobId=9 JobState=PENDING Reason=None NodeList= NumNodes=2", 0, 1, "n1,n2"),
    ("hetjob", "JobId=9 JobState=COMPLETING Reason=None NodeList=n1,n2 NumNodes=2", 0, 1, "n1,n2"),
    ("homogeneous", "JobId=7 JobState=RUNNING ExcNodeList=n2 NodeList=n1,n3 Num=2", 0, 1, "n2"),
    ("homogeneous", "JobId=7 JobState=RUNNING NodeList=n1 NumNodes=1", 3, 3, ""),  # its own status
    ("homogeneous", "JobId=7 JobState=RUNNING Reason=None NodeList=n1,n2 NumNodes=2", 0, 0, ""),
    ("homogeneous", "", 0, 0, "")], ids=["waits", "ends", "shrank", "failed", "whole", "no answer"])
def test_a_trainer_whose_node_was_lost_has_not_succeeded(
        pretence: Pretence, name: str, told: str, end: int, status: int, lost: str) -> None:
    """Of a step that lost its node srun of Slurm 22.05 says status 0."""
    first = "JobId=7 JobState=RUNNING NodeList=c1,c2 NumNodes=2" if name == "hetjob" else ""
    (pretence.folder / "bin" / "scontrol").write_text(f"""{SCONTROL}
        [ "$2" != hostnames ] || tr , '\\n' <<< "$3"
        [ "$2 $3" != "show job" ] || printf '%s\\n' {f"'{first}'" if first else ""} '{told}'
        """)
    trainer = f"echo n1,n2 > $TANGRAM_HOME/jobs/7/trainer.step.nodes; exit {end}"
    env = {} if name == "hetjob" else {"SLURM_HET_SIZE": "", "SLURM_JOB_ID_HET_GROUP_2": "",
                                       "SLURM_JOB_NUM_NODES": "2",
                                       "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}
    text = render(load(name), {**FULL, "trainer": trainer} if name == "hetjob" else
                  {"partition": "", "trainer": trainer, "gateway": "off"})
    found, _, err = pretence.run("", text, **env)
    assert (found, f"took {lost} from job 7" in err) == (status, bool(lost)), err
    assert ("tangram shutdown" in pretence.logged()) == (status == 0)


def test_a_trainer_has_the_umask_of_its_job_and_the_rest_a_private_one(pretence: Pretence) -> None:
    setup = "umask 0027"  # as from a shell of the user
    text = render(load("hetjob"), {**FULL, "trainer": "umask", "setup": setup})
    status, out, err = pretence.run("", text)
    assert (status, out, err) == (0, "0027\n", "")
    (folder,) = (pretence.folder / ".tangram" / "jobs").iterdir()
    assert (folder / "access.json").stat().st_mode & 0o777 == 0o600


def test_a_relative_home_is_that_of_the_folder_of_the_submission(pretence: Pretence) -> None:
    """Slurm runs no task epilog whose path is relative."""
    home = os.path.relpath(pretence.folder / "home")
    status, out, err = pretence.run('echo "$TANGRAM_HOME"', TANGRAM_HOME=home)
    assert (status, err) == (0, "")
    assert out.startswith("/") and os.path.samefile(out.strip(), home)


def test_a_job_without_home_in_its_environment_has_that_of_its_user(pretence: Pretence) -> None:
    status, out, err = pretence.run('echo "$HOME"', HOME="", TANGRAM_HOME=str(pretence.folder))
    assert (status, out, err) == (0, pwd.getpwuid(os.getuid()).pw_dir + "\n", "")


@pytest.mark.parametrize("name", ["single-node", "satellite"])
def test_a_home_with_a_quoted_tilde_is_below_the_users_home(name: str, tmp_path: Path) -> None:
    """An environment file of a launcher has `TANGRAM_HOME=~/x` without a shell that expands it."""
    script = tmp_path / "job.sbatch"
    text = render(load(name), {"broker": "1"} if name == "satellite" else {"trainer": "true"})
    script.write_text(text.replace('export TANGRAM_JOB=', 'echo "$TANGRAM_HOME"; exit 5\n', 1))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False,
                          cwd=tmp_path, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                                             "HOME": "/of/mine", "SLURM_JOB_ID": "7",
                                             "TANGRAM_HOME": "~/x y"})
    assert (done.returncode, done.stdout) == (5, "/of/mine/x y\n"), done.stderr


def test_the_task_epilog_keeps_the_folder_of_a_broker_that_lives(pretence: Pretence) -> None:
    """And it ends while the broker lives. slurmstepd starts it with SIGALRM blocked."""
    trainer = """touch "$TANGRAM_HOME/jobs/7/ended"  # first the workers end
        until [ "$(grep -c het-group "$LOG.epilogs")" = 2 ]; do sleep 0.1; done 2> /dev/null
        ls $TMPDIR"""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        child = pretence.start(trainer)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        out, err = child.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        child.terminate()
        out, err = child.communicate()
    assert (child.returncode, out, err) == (0, "tangram-broker-job7-x\n", "")


def test_a_lost_component_may_start_only_when_the_job_has_ended(pretence: Pretence) -> None:
    """Slurm would start it alone, and then end and hold the whole job."""
    squeue = pretence.folder / "bin" / "squeue"
    squeue.write_text(
        "#!/bin/bash\nprintf '%-20s%-20s%-20s\\n' 7 0 RUNNING 8 1 PENDING 9 0 RUNNING\n")
    squeue.chmod(0o755)
    held = "scontrol update jobid=8 starttime=now+"
    status, out, err = pretence.run(f"""touch "$TANGRAM_HOME/jobs/7/ended"  # the workers end
        until grep -q '^{held}' "$LOG"; do sleep 0.1; done""")
    assert (status, err) == (0, "") and out.startswith("tangram: job 7 has lost its GPU nodes")
    assert [line for line in pretence.logged() if line.startswith("scontrol update")] == [
        f"{held}30days", f"{held}300seconds", "scontrol update jobid=8 dependency=afternotok:7"]


def test_a_component_that_is_lost_as_the_job_ends_may_start_again(pretence: Pretence) -> None:
    squeue, scontrol = pretence.folder / "bin" / "squeue", pretence.folder / "bin" / "scontrol"
    squeue.write_text(
        "#!/bin/bash\nprintf '%-20s%-20s%-20s\\n' 7 0 RUNNING 8 1 PENDING 9 0 RUNNING\n")
    squeue.chmod(0o755)
    scontrol.write_text("""#!/bin/bash
        if [[ $* == *30days ]]; then  # it takes effect late
            touch "$LOG.held"
            until grep -q '+300seconds' "$LOG"; do sleep 0.05; done
        fi
        echo "$*" >> "$LOG"
        """)
    pretence.run("""touch "$TANGRAM_HOME/jobs/7/ended"
        until [ -e "$LOG.held" ]; do sleep 0.05; done""")
    found = [line.rpartition("+")[2] for line in pretence.logged() if "starttime=now" in line]
    assert found == ["300seconds", "30days", "300seconds"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_trainer_then_broker(pretence: Pretence, number: int) -> None:
    child = pretence.start("""trap 'echo "trainer ended" >> "$LOG"; exit 4' TERM
        echo up; while :; do sleep 0.05; done""")
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (4, "")  # the trainer's own status
    assert pretence.ends() == [f"{SIGNALLED} 9.5", "trainer ended", "broker ended"]


def test_a_trainer_that_saves_its_state_is_signalled_once(pretence: Pretence) -> None:
    child = pretence.start("""trap 'echo "trainer told" >> "$LOG"; sleep 1; exit 4' TERM
        echo up; while :; do sleep 0.05; done""")
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGUSR1)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (4, "") and "Cancel" not in out
    assert pretence.logged().count("trainer told") == 1


def test_a_trainer_that_ignores_sigterm_is_killed(pretence: Pretence) -> None:
    trainer = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    text = render(load("hetjob"), {**FULL, "trainer": trainer, "warn": "2"})
    child = pretence.start("", text)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 143
    assert pretence.ends()[1:] == ["srun ended", "broker ended"]
    assert "broker drained" not in pretence.logged() and "tangram shutdown" not in pretence.logged()


def test_a_broker_that_does_not_start_ends_the_job_script(pretence: Pretence) -> None:
    status, _, err = pretence.run("true", BROKER_FAILS="1")
    assert status == 2 and err.count("\n") == 2 and "the broker did not start" in err
    assert len(pretence.logged()) == 1


def test_a_killed_broker_does_not_hang_the_end_of_the_job_script(pretence: Pretence) -> None:
    child = pretence.start("echo up; sleep 1; touch $TANGRAM_HOME/jobs/7/ended")
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    broker = subprocess.run(["pgrep", "-P", str(child.pid), "-f", "tangram broker"],
                            capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(broker[0]), signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == 0


@pytest.mark.parametrize("key", sorted({*load("hetjob").keys} - {"ranks"}))
def test_a_job_script_with_any_placeholder_left_stops(pretence: Pretence, key: str) -> None:
    text = load("hetjob").text
    for other in {*load("hetjob").keys, *COMPUTED} - {key}:
        text = text.replace(f"<{other.upper()}>", "1")
    status, _, err = pretence.run("", text)
    assert (status, err.count("\n")) == (2, 1) and f": <{key.upper()}>;" in err
    assert pretence.logged() == []


@pytest.mark.parametrize("name", NAMES)
def test_a_raw_template_does_not_start(pretence: Pretence, name: str) -> None:
    status, _, err = pretence.run("", load(name).text)
    assert (status, err.count("\n")) == (2, 1) and f"template render {name}" in err
    assert pretence.logged() == []


def test_a_trainer_may_have_words_that_look_like_placeholders(pretence: Pretence) -> None:
    text = render(load("hetjob"), {**FULL, "trainer": "echo '<EOS> <PAD> <TIMES>'"})
    assert left_open(text) == []
    assert pretence.run("", text) == (0, "<EOS> <PAD> <TIMES>\n", "")
    assert left_open("srun <EOS>") == ["<EOS>"]  # a script whose keys are not known


@pytest.mark.parametrize(("requeues", "start", "again"),
                         [("0", "", 0), ("2", "1", 1), ("2", "2", 0)])
def test_a_job_near_its_time_limit_is_requeued_up_to_requeues_times(
        pretence: Pretence, requeues: str, start: str, again: int) -> None:
    """`--signal=B:USR1@...` requeues while the trainer has work left; SIGTERM never does."""
    trainer = "trap 'exit 4' TERM; echo up; while :; do sleep 0.05; done"
    text = render(load("hetjob"), {**FULL, "trainer": trainer, "requeues": requeues})
    child = pretence.start("", text, SLURM_RESTART_COUNT=start)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGUSR1)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err, out.count(f"start {int(start or 0) + 1} of {requeues} follows")
            ) == (4, "", again)
    assert out.count("the time limit is near (warn=") == out.count("the job ends") == 1 - again
    assert [line for line in pretence.ends() if line.startswith("scontrol")] == []
    assert pretence.logged().count("scontrol requeue 7") == again
    assert pretence.logged().count("broker drained") == 1
    if again:
        assert pretence.logged()[-2:] == ["broker ended", "scontrol requeue 7"]


@pytest.mark.parametrize(("said", "times", "err"), [
    ("Unexpected message received for job 7", 2, ""),  # seen where nobody listens
    ("slurm_requeue error: Unable to contact slurm controller (connect failure)", 2, ""),
    ("Job is pending execution for job 8", 1, ""),  # a het job had lost this component
    ("Requested operation is presently disabled for job 7", 1,
     "tangram: job 7 is over without another start: Requested operation is presently disabled for "
     "job 7 (`#SBATCH --requeue` allows it)\n")])
def test_a_requeue_waits_for_a_controller_that_is_away(
        pretence: Pretence, said: str, times: int, err: str) -> None:
    """Slurm's own refusal is final, except that of a component that waits already."""
    scontrol = pretence.folder / "bin" / "scontrol"
    scontrol.write_text(f"""{SCONTROL}
        if [ "$1" = requeue ] && [ "$(grep -c "^scontrol requeue" "$LOG")" -eq 1 ]; then
            echo "{said}" >&2; exit 1
        fi""")
    trainer = "trap 'exit 4' TERM; echo up; while :; do sleep 0.05; done"
    text = render(load("hetjob"), {**FULL, "trainer": trainer, "requeues": "1"})
    child = pretence.start("", text)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGUSR1)
    assert child.communicate(timeout=60)[1] == err and child.returncode == 4
    assert pretence.logged().count("scontrol requeue 7") == times


@pytest.mark.parametrize("moment", ["setup", "broker"])
def test_a_warning_before_the_trainers_start_requeues_the_job(
        pretence: Pretence, moment: str) -> None:
    """The time limit may be near at once, and a preemption may come at any time."""
    warn = '(sleep 0.1; kill -USR1 "$$") & sleep 0.5'
    text = render(load("hetjob"), {**FULL, "trainer": "echo trainer", "requeues": "1",
                                   "setup": warn if moment == "setup" else ""})
    if moment == "broker":
        text = text.replace("\nbroker=$!\n", f"\nbroker=$!; {warn}\n")
    status, out, err = pretence.run("", text)
    assert (status, err) == (143, "")
    assert out == "tangram: the time limit is near: start 1 of 1 follows\n"
    assert pretence.logged()[-1] == "scontrol requeue 7"
    assert not any("rank" in line or "drained" in line for line in pretence.logged())


@pytest.mark.parametrize("moment", ["setup", "waiting"])
def test_a_warning_before_a_satellites_workers_start_requeues_it(
        pretence: Pretence, moment: str) -> None:
    warn = '(sleep 0.1; kill -USR1 "$$") & sleep 0.5'
    text = render(load("satellite"), {"broker": "5", "requeues": "1",
                                      "setup": warn if moment == "setup" else ""})
    if moment == "waiting":
        text = text.replace("; do                          # the broker may be starting",
                            f"; do {warn}")
    status, out, err = pretence.run("", text)
    assert (status, err) == (0, "")
    assert out == "tangram: the time limit is near: start 1 of 1 follows\n"
    assert pretence.logged() == ["scontrol requeue 7"]


def test_a_satellite_of_a_job_that_has_no_broker_says_so(pretence: Pretence) -> None:
    text = render(load("satellite"), {"broker": "5"}).replace("n < 600", "n < 2")
    status, out, err = pretence.run("", text)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"job 5 has no folder below TANGRAM_HOME {pretence.folder}/.tangram" in err


def test_a_replay_ends_with_its_own_status(pretence: Pretence) -> None:
    """It has neither a broker nor a folder of a job."""
    tool = pretence.folder / "bin" / "tangram"
    tool.write_text("#!/bin/bash\nexit 4\n")
    text = render(load("replay"), {"workload": "w.jsonl", "setup": f"cd {pretence.folder}"})
    status, out, err = pretence.run("", text, SLURM_JOB_NAME="r")
    assert (status, out, err) == (4, "", "")


def test_a_replay_near_its_time_limit_ends_in_order_and_is_requeued(pretence: Pretence) -> None:
    """srun would kill it at once, and its broker's folder would stay on the node."""
    tool = pretence.folder / "bin" / "tangram"
    tool.write_text("""#!/bin/bash
        echo $$ > "$LOG.pid"; trap 'rm up; exit 143' TERM; touch up
        while :; do sleep 0.05; done
        """)
    text = render(load("replay"), {"workload": "w.jsonl", "setup": f"cd {pretence.folder}",
                                   "requeues": "1"})
    child = pretence.start("", text, SLURM_JOB_NAME="r")
    until(lambda: (pretence.folder / "up").exists(), "the replay to begin")
    child.send_signal(signal.SIGUSR1)
    out, err = child.communicate(timeout=15)
    assert child.returncode == 143 and "start 1 of 1 follows" in out, err
    assert not (pretence.folder / "up").exists()
    assert pretence.logged() == [f"{SIGNALLED} 7", "scontrol requeue 7"]


def test_each_start_of_a_requeued_job_has_its_own_log_file(pretence: Pretence) -> None:
    """The log file of the first start is kept."""
    out = pretence.folder / "tangram-7.out"
    text = render(load("hetjob"), {**FULL, "trainer": "echo start ${SLURM_RESTART_COUNT:-0}"})
    for start in ("", "1", "2"):
        with open(out, "a") as file:
            pretence.start("", text, stdout=file, SLURM_RESTART_COUNT=start).communicate(timeout=60)
    logs = [out, out.with_name("tangram-7.1.out"), out.with_name("tangram-7.2.out")]
    assert [log.read_text() for log in logs] == [f"start {n}\n" for n in range(3)]


# A script that a trainer of another job submits, a heterogeneous one that was requeued twice, gets
# these variables with the rest of its environment, as Slurm does not replace them.
OUTER = {"SLURM_HET_SIZE": "3", "SLURM_JOB_ID_HET_GROUP_0": "5", "SLURM_JOB_ID_HET_GROUP_2": "6",
         "SLURM_JOB_NODELIST_PACK_GROUP_1": "g1", "SLURM_STEP_ID": "4", "SLURM_STEP_NODELIST": "g1",
         "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:",
         "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "17", "tangram_asked_end": "yes",
         "TANGRAM_ACCESS": "/other/access.json", "TANGRAM_GATEWAY": "1", "RANK": "3",
         "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "g1", "MASTER_PORT": "29500",
         "PMI_RANK": "3", "PMIX_NAMESPACE": "5.4", "OMPI_COMM_WORLD_RANK": "3",
         "SLURM_GPUS": "1", "SLURM_GPUS_PER_NODE": "1", "SLURM_GPUS_PER_TASK": "1",
         "SLURM_CPUS_PER_GPU": "2", "SLURM_NTASKS_PER_GPU": "1", "SLURM_MEM_PER_GPU": "100",
         "SLURM_NTASKS_PER_TRES": "1", "SLURM_OVERCOMMIT": "1",
         "SLURM_MEM_PER_CPU": "100", "SLURM_THREADS_PER_CORE": "1",
         "SLURM_HINT": "nomultithread"}
SQUEUE = """\
#!/bin/bash
[ "$SLURM_TIME_FORMAT" = standard ] && echo "${ENDS:-2096-10-02T07:06:40}"
"""


def told_of_another_job(pretence: Pretence, **env: str) -> dict[str, str]:
    """The variables of OUTER that the trainer of a job with them finds, after a run that went
    well."""
    squeue = pretence.folder / "bin" / "squeue"
    squeue.write_text(SQUEUE)
    squeue.chmod(0o755)
    keys = {"cpus_lent": "2", "ranks": "2", "gateway": "off", "mpi": "none",
            "trainer": "env"}
    status, out, err = pretence.run("", render(load("single-node"), keys), TZ="UTC0",
                                    SLURM_JOB_CPUS_PER_NODE="4", **env)
    assert (status, err) == (0, "")
    lines = [line.partition("=") for line in out.splitlines()]
    return {name: value for name, _, value in lines if name in OUTER}


@pytest.mark.parametrize(("said", "setting"), [("", "0"), ("600", "600")])
def test_a_job_whose_workers_are_satellites_does_not_end_before_they_start(
        pretence: Pretence, said: str, setting: str) -> None:
    """They may wait in Slurm's queue for longer than the `no_worker_s` of other jobs."""
    keys = {"gateway": "off", "mpi": "none", "trainer": 'echo "$TANGRAM_NO_WORKER_S"'}
    status, out, err = pretence.run("", render(load("satellites"), keys), TANGRAM_NO_WORKER_S=said)
    assert (status, out, err) == (0, f"{setting}\n", "")


def test_what_another_job_left_in_the_environment_is_dropped(pretence: Pretence) -> None:
    """The end and the number of starts are this job's, and the step is the fake srun's."""
    assert told_of_another_job(pretence, RESTARTS="0", SLURM_MEM_PER_NODE="600",
                               **OUTER) == {
        "SLURM_RESTART_COUNT": "0", "SLURM_JOB_END_TIME": "4000000000", "tangram_asked_end": "yes",
        "SLURM_STEP_ID": "5"}
    assert not list(pretence.folder.glob("*.2.out"))


@pytest.mark.parametrize("setup", ["", "export "])
def test_options_that_a_user_has_set_for_slurms_commands_do_not_reach_the_scripts_own(
        pretence: Pretence, setup: str) -> None:
    """With them `squeue` told no end of the job, `scancel` left its trainer untold, and `srun` gave
    the job's steps no environment."""
    options = {"SQUEUE_PARTITION": "gpu", "SQUEUE_STATES": "PD", "SCANCEL_STATE": "PENDING",
               "SINFO_PARTITION": "gpu", "SCONTROL_ALL": "1", "SLURM_CLUSTERS": "other",
               "SBATCH_PARTITION": "cpu", "SLURM_CONSTRAINT": "x", "SLURM_TIMELIMIT": "9",
               "SRUN_CPUS_PER_TASK": "1", "SRUN_EXPORT_ENV": "NONE", "SLURM_NO_KILL": "1",
               "SLURM_RESV_PORTS": "2", "SLURM_REMOTE_CWD": "/", "SLURM_WORKING_DIR": "/",
               "SLURM_BCAST": "/tmp/x", "SLURM_STDOUTMODE": "none", "SRUN_OUTPUT": "none",
               "SRUN_ERROR": "none", "SRUN_INPUT": "none", "SRUN_CONTAINER": "/x"}
    if setup:  # as by `source ~/.bashrc`
        setup += " ".join(f"{name}={value}" for name, value in options.items())
    keys = {"cpus_lent": "2", "ranks": "2", "gateway": "off", "mpi": "none", "trainer": "env",
            "setup": setup}
    status, out, err = pretence.run("", render(load("single-node"), keys), SLURM_HET_SIZE="",
                                    SLURM_JOB_CPUS_PER_NODE="4", **({} if setup else options))
    assert (status, err) == (0, "")
    left = {line.partition("=")[0] for line in out.splitlines()}
    assert left & set(options) == {"SBATCH_PARTITION"}


@pytest.mark.parametrize(("threads", "hint", "kept"), [
    ("*", "nomultithread", set()), ("*", "multithread", {"SLURM_HINT"}),
    ("1", "nomultithread", {"SLURM_HINT", "SLURM_THREADS_PER_CORE"})])
def test_cores_of_one_thread_that_setup_asks_for_are_dropped_unless_the_job_has_them(
        pretence: Pretence, threads: str, hint: str, kept: set[str]) -> None:
    """The workers' step asked for more cores than the job has, and waited for ever."""
    names = {"SLURM_HINT": hint, "SLURM_THREADS_PER_CORE": "1", "SLURM_OVERCOMMIT": "1"}
    setup = "export " + " ".join(f"{name}={value}" for name, value in names.items())
    keys = {"cpus_lent": "2", "ranks": "2", "gateway": "off", "mpi": "none", "trainer": "env",
            "setup": setup}
    status, out, err = pretence.run("", render(load("single-node"), keys), SLURM_HET_SIZE="",
                                    SLURM_JOB_CPUS_PER_NODE="4", RESTARTS="0", THREADS=threads)
    assert (status, err) == (0, "")
    assert {line.partition("=")[0] for line in out.splitlines()} & set(names) == kept


def test_a_job_without_a_time_limit_has_an_end_that_slurm_is_asked_for_again(pretence: Pretence
                                                                             ) -> None:
    """The broker asks Slurm only for ends that it was told; a limit may be set while it runs."""
    told = told_of_another_job(pretence, ENDS="NONE", SLURM_JOB_END_TIME="",
                               SLURM_HET_SIZE="")
    assert 364 * 86_400 < int(told["SLURM_JOB_END_TIME"]) - time.time() < 366 * 86_400


def test_what_the_user_and_this_job_set_is_kept(pretence: Pretence) -> None:
    own = {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "5000000000", "MASTER_PORT": "29500",
           "SLURM_CPU_BIND": "none", "SLURM_THREADS_PER_CORE": "1", "SLURM_HINT": "compute_bound"}
    told = told_of_another_job(pretence, RESTARTS="2", THREADS="1", SLURM_HET_SIZE="", **own)
    assert {name: told[name] for name in own} == own and told["SLURM_JOB_ID_HET_GROUP_0"] == "7"


def test_the_last_element_of_an_array_signals_and_requeues_itself_alone(pretence: Pretence) -> None:
    """It has the number of the whole array; any other element has a number of its own."""
    trainer = "trap 'exit 4' TERM; echo up; while :; do sleep 0.05; done"
    text = render(load("single-node"), {"cpus_lent": "2", "ranks": "2", "gateway": "off",
                                        "mpi": "none", "requeues": "1", "trainer": trainer})
    text = text.replace("ranks=$!", 'ranks=$!; sleep 1; pgrep -P "$ranks" > "$LOG.pid"')
    for array, name in (("7", "7_3"), ("5", "7")):
        pretence.log.unlink(missing_ok=True)
        child = pretence.start("", text, SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID="3",
                               SLURM_HET_SIZE="", SLURM_JOB_CPUS_PER_NODE="4")
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        time.sleep(1.5)
        child.send_signal(signal.SIGUSR1)
        _, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (4, "")
        told = [line for line in pretence.logged() if line.startswith("sc")]
        assert told == ["scontrol -o show node ", f"{SIGNALLED} {name}.5",
                        f"scontrol requeue {name}"]


def test_a_raw_template_or_a_wrong_place_to_run_is_refused_in_one_line(pretence: Pretence) -> None:
    began = time.monotonic()
    status, _, err = pretence.run("", load("hetjob").text)
    assert (status, err.count("\n")) == (2, 1) and "<PARTITION_CPU>" in err and "<TRAINER>" in err
    status, _, err = pretence.run("true", SLURM_HET_SIZE="")
    assert (status, err.count("\n")) == (2, 1) and "sbatch" in err
    (pretence.folder / "bin" / "tangram").unlink()
    status, _, err = pretence.run("true", PATH=f"{pretence.folder}/bin:/usr/bin:/bin")
    assert (status, err.count("\n")) == (2, 1) and "`setup`" in err
    assert time.monotonic() - began < 30 and pretence.logged() == []


@pytest.mark.parametrize("name", ["hetjob", "single-node", "satellite"])
def test_a_failing_setup_command_is_named(name: str, tmp_path: Path) -> None:
    """With `set -e` alone the job would end without a message where the command prints none."""
    keys = load(name).keys
    least = {k: "" if v.optional else v.default or "9" for k, v in keys.items()}
    script = tmp_path / "job.sbatch"
    script.write_text(render(load(name), {**least, "setup": "[ a = b ]"}))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False,
                          cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "tangram: error: setup: `[ a = b ]` ended with status 1\n"


def test_a_setup_of_which_a_part_fails_gives_a_warning(pretence: Pretence) -> None:
    """bash goes on after a failure before `&&`, as in `module load x && source y`."""
    text = render(load("hetjob"), {**FULL, "trainer": "echo up", "setup": "[ a = b ] && cd /"})
    status, out, err = pretence.run("", text)
    assert (status, out) == (0, "up\n")
    assert err == ("tangram: warning: setup: a command before `&&` ended with status 1, and those "
                   "after it were not run\n")


@pytest.mark.parametrize("name", ["single-node", "satellite"])
def test_setup_may_read_variables_that_are_not_set(name: str, tmp_path: Path) -> None:
    """The activation scripts of conda packages do, as does /etc/bashrc; the rest may not."""
    keys = load(name).keys
    least = {k: "" if v.optional else v.default or "9" for k, v in keys.items()}
    script = tmp_path / "job.sbatch"
    setup = 'export FLAGS_BEFORE="$FLAGS"; tangram() { :; }; echo "[$FLAGS_BEFORE]"'
    text = render(load(name), {**least, "setup": setup})
    script.write_text(text.replace("trap - ERR\n", 'trap - ERR; echo "$FLAGS_AFTER"\n'))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False,
                          cwd=tmp_path, env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"})
    assert done.stdout == "[]\n" and done.returncode == 1
    assert "FLAGS_AFTER: unbound variable" in done.stderr
