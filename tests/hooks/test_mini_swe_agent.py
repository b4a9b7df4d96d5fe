"""mini-swe-agent's environment: the behaviours of every adapter, and what its own agent sees."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    eventually,
    memory_taken,
    sessions_open,
)
from helpers.hostile_rig import reason_to_skip
from helpers.other_python import client_env, make_venv
from helpers.repair_task import repair_task

from tangram_hpc import LocalCluster, Session
from tangram_hpc.errors import FileMissing, InvalidInput, TangramError
from tangram_hpc.hooks.mini_swe_agent import MiniSweEnvironment

__all__ = ["adapters_cluster"]
SHELL = ["/bin/sh", "-c"]



@pytest.mark.skipif(find_spec("minisweagent") is not None, reason="mini-swe-agent is installed")
def test_its_absence_is_one_line() -> None:
    told = subprocess.run([sys.executable, "-m", "tangram_hpc.hooks.mini_swe_agent", "swebench"],
                          capture_output=True, text=True, timeout=60)
    assert told.returncode == 1 and told.stderr.count("\n") == 1, told.stderr
    assert "pip install" in told.stderr and "[mini-swe-agent]" in told.stderr


class TestMiniSweAgentAbsent(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        try:
            return MiniSweEnvironment(timeout=LIMIT_S, interpreter=SHELL, **options)
        except TangramError as error:  # its runner notes the error and ends the trajectory
            return error

    def call(self, trajectory: Any, line: str) -> str:
        if isinstance(trajectory, TangramError):
            return str(trajectory)
        try:
            told = trajectory.execute({"command": line})
        except TangramError as error:
            return str(error)
        code = told["returncode"]
        return str(told["output"]) + (f"{code} {told['exception_info']}" if code else "")

    def end(self, trajectory: Any) -> None:
        if isinstance(trajectory, MiniSweEnvironment):
            trajectory.cleanup()

    def lose(self, trajectory: Any) -> None:
        trajectory.session.close()


def test_a_command_that_is_no_utf_8_is_told_to_the_policy(cluster: LocalCluster) -> None:
    environment = MiniSweEnvironment(interpreter=SHELL)
    told = environment.execute({"command": "echo '\ud83d'"})  # as in the JSON of a tool call
    assert (told["returncode"], told["output"]) == (-1, "")
    assert "character 6 of it is half of a surrogate pair" in told["exception_info"]
    assert told["extra"]["exception_type"] == "UnicodeEncodeError"
    assert environment.execute({"command": "echo on"})["output"] == "on\n"
    environment.cleanup()


def test_output_is_in_the_order_in_which_it_was_written(cluster: LocalCluster) -> None:
    environment = MiniSweEnvironment(interpreter=SHELL)
    told = environment.execute({"command": "echo 1; echo 2 >&2; echo 3"})
    assert told == {"output": "1\n2\n3\n", "returncode": 0, "exception_info": ""}


def test_a_command_over_its_time_limit_has_what_it_wrote_and_minus_1(cluster: LocalCluster) -> None:
    environment = MiniSweEnvironment(interpreter=SHELL)
    told = environment.execute({"command": "echo begun; sleep 60"}, timeout=LIMIT_S)
    assert told["output"] == "begun\n" and told["returncode"] == -1
    assert "timed out after 3 seconds" in told["exception_info"]
    assert told["extra"]["exception_type"] == "TimeoutExpired"


def test_an_interrupted_command_is_ended(cluster: LocalCluster) -> None:
    """The interactive agent goes on after ^C; the next command must not wait for this one."""
    environment = MiniSweEnvironment(interpreter=SHELL)
    environment.execute({"command": "true"})
    threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        environment.execute({"command": "sleep 120; touch went-on"}, timeout=120)
    begun = time.monotonic()
    assert environment.execute({"command": "ls"})["output"] == ""
    assert time.monotonic() - begun < 60


def test_variables_of_the_configuration_and_of_this_process_are_seen(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "given")
    monkeypatch.setenv("HIDDEN", "not given")
    environment = MiniSweEnvironment(interpreter=SHELL, env={"PAGER": "cat"},
                                     forward_env=["OUTER", "MISSING"])
    told = environment.execute({"command": "echo $PAGER $OUTER ${HIDDEN-none}"})
    assert told["output"] == "cat given none\n"


def test_files_that_cannot_be_written_are_an_error(cluster: LocalCluster) -> None:
    with pytest.raises(FileMissing, match="/proc/nothing/here"):
        MiniSweEnvironment(session={"files": {"/proc/nothing/here": "x"}})
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_an_environment_that_waits_too_long_says_so(cluster: LocalCluster) -> None:
    with memory_taken(cluster) as mem_mib, \
            pytest.raises(TimeoutError, match=r"not open within pull_timeout: 0\.2 s"):
        MiniSweEnvironment(mem=mem_mib, pull_timeout=0.2)
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_an_environment_that_is_forgotten_closes_its_session(cluster: LocalCluster) -> None:
    assert eventually(lambda: sessions_open(cluster) == 0)
    environment = MiniSweEnvironment(interpreter=SHELL)
    assert sessions_open(cluster) == 1
    del environment
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_the_garbage_collection_itself_closes_nothing(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    close = Session.close

    def noted(session: Session) -> None:
        threads.append(threading.current_thread())
        close(session)

    monkeypatch.setattr(Session, "close", noted)
    environment = MiniSweEnvironment(interpreter=SHELL)
    del environment
    gc.collect()
    assert eventually(lambda: len(threads) == 1 and sessions_open(cluster) == 0)
    assert threads[0] is not threading.current_thread()  # this one may hold the client's lock


def test_what_it_was_configured_with_is_in_templates_and_trajectories(
        cluster: LocalCluster) -> None:
    environment = MiniSweEnvironment(cwd="", interpreter=SHELL, mem="64M", name="one")
    told = environment.get_template_vars(task="t")
    assert told["task"] == "t" and told["interpreter"] == SHELL and told["system"] == "Linux"
    about = environment.serialize()["info"]["config"]
    assert about["environment_type"].endswith("mini_swe_agent.MiniSweEnvironment")
    assert about["environment"]["session"]["mem"] == "64M"
    json.dumps(about)


@pytest.mark.parametrize(("options", "word"), [
    ({"memory": "1G"}, "memory"), ({"container_timeout": "soon"}, "container_timeout"),
    ({"background": "never"}, "background"),
    ({"session": {"memm": "1G"}}, "session: memm: Client.session has no such argument.* mem,"),
    ({"session": "mem=1G"}, "session: 'mem=1G' is not a mapping"),
    ({"interpreter": "bash -c"}, "interpreter: 'bash -c' is not a list of words")],
    ids=["key", "duration", "session", "nested", "text", "interpreter"])
def test_a_wrong_option_is_refused_by_its_name(
        cluster: LocalCluster, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        MiniSweEnvironment(**options)


# runs under mini-swe-agent's own packages: its batch runner, agent, model and image lookup
PROGRAM = """
import json, sys
from pathlib import Path
from minisweagent.run.benchmarks.swebench import get_sb_environment, process_instance
from minisweagent.run.benchmarks.utils.batch_progress import RunBatchProgressManager
from minisweagent.models.test_models import make_output
from tangram_hpc.hooks.mini_swe_agent import stand_in

instance, out = json.loads(sys.stdin.read()), Path(sys.argv[1])
stand_in()
lines = ["python3 -c 'import stats; print(stats.mean([1, 2, 6]))'",
         "cat /no/such/file", "sleep 60",
         "sed -i 's/(len(numbers) - 1)/len(numbers)/' stats.py",
         "git diff -- stats.py >/tmp/patch.txt && cat /tmp/patch.txt >&2",
         "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat /tmp/patch.txt"]
config = {
    "agent": {"system_template": "s", "instance_template": "{{task}} {{cwd}}", "cost_limit": 0},
    "environment": {"environment_class": "docker", "cwd": "/testbed", "timeout": 10,
                    "interpreter": ["bash", "-c"], "env": {"PAGER": "cat"}},
    "model": {"model_class": "deterministic", "model_name": "deterministic",
              "outputs": [make_output(line, [{"command": line}]) for line in lines]}}
process_instance(instance, out, config, RunBatchProgressManager(1))

def judged(patch):
    # as SWE-bench does: a fresh container, the patch, then the hidden tests
    env = get_sb_environment(config, instance)
    for name, text in (("model", patch), ("tests", instance["test_patch"])):
        if text:
            env.session.write("/tmp/" + name, text).result()
            told = env.execute({"command": "git apply /tmp/" + name})
            assert told["returncode"] == 0, told
    codes = [env.execute({"command": "python3 -m unittest " + test})["returncode"]
             for test in instance["FAIL_TO_PASS"] + instance["PASS_TO_PASS"]]
    env.cleanup()
    return codes

patch = json.loads((out / "preds.json").read_text())[instance["instance_id"]]["model_patch"]
print("RESULT" + json.dumps({
    "patch": patch, "none": judged(""), "gold": judged(instance["patch"]),
    "model": judged(patch)}))
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["2.4.6"])
def test_mini_swe_agent_repairs_a_repository_and_is_judged(tmp_path: Path, version: str) -> None:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    programs = make_venv(tmp_path / "venv", sys.executable, [f"mini-swe-agent=={version}"])
    instance = repair_task(tmp_path)
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        done = subprocess.run(
            [str(programs / "python"), "-c", PROGRAM, str(tmp_path / "out")],
            input=json.dumps(instance), text=True, capture_output=True, timeout=600, check=False,
            env=client_env(cluster.access, MSWEA_SILENT_STARTUP="1", MSWEA_CONFIGURED="1",
                           MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path / "config")))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert eventually(lambda: sessions_open(cluster) == 0)
    told = json.loads(done.stdout.partition("RESULT")[2].splitlines()[0])
    assert told["patch"] == instance["patch"]
    assert told["none"] == [1, 0] and told["gold"] == told["model"] == [0, 0]
    path = tmp_path / f"out/{instance['instance_id']}/{instance['instance_id']}.traj.json"
    trajectory = json.loads(path.read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    seen = "\n".join(str(message.get("content")) for message in trajectory["messages"])
    assert "4.5" in seen and "No such file" in seen and "timed out after 10 seconds" in seen
