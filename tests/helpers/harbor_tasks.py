"""Ten task folders for Harbor, each about one thing that a task may ask of its environment, with
the reward that Harbor's `oracle` must get for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("bash", "date", "find", "gzip", "head", "sed", "seq", "sort", "tar", "tee", "wc")


@dataclass
class Task:
    """A task folder.

    Attributes:
        solve: what the oracle runs.
        check: a shell condition: the reward is 1 where it holds.
        dockerfile: the lines after FROM; None for a task with `docker_image`.
        environment, agent: lines of these tables of task.toml.
        variables: lines of the table `environment.env`.
        files: name -> content, in the folder `environment`.
        verdict: how the reward is written, instead of by `check`.
        reward: what Harbor must tell.
        error: the exception that Harbor must tell; empty for none.
    """

    solve: str
    check: str = "true"
    dockerfile: str | None = None
    environment: str = ""
    agent: str = ""
    variables: str = ""
    files: dict[str, str] = field(default_factory=dict)
    verdict: str = ""
    reward: dict[str, float] = field(default_factory=lambda: {"reward": 1.0})
    error: str = ""


TASKS = {
    "dockerfile": Task(
        "cp data.txt answer.txt", "grep -q 42 /app/answer.txt && grep -qx 'built 1' /app/built",
        "ARG N=1\nENV A=$N\nWORKDIR /app\nCOPY data.txt ./\nRUN echo built $A \\\n  > built\n",
        files={"data.txt": "42\n"}),
    "here-document": Task(
        "/usr/local/bin/tool >/answer", "grep -qx 'tool 7' /answer",
        "RUN mkdir -p /usr/local/bin && cat >/usr/local/bin/tool <<'EOF'\n#!/bin/sh\necho tool $X\n"
        "EOF\nRUN [\"chmod\", \"+x\", \"/usr/local/bin/tool\"]\nENV X=7\n"),
    "image-and-files": Task(
        "cat given.txt >done.txt", "grep -q given /place/done.txt",
        environment='workdir = "/place"\n', files={"given.txt": "given\n"}),
    "variables": Task(
        "echo $PLACE >/place", "grep -qx there /place && test $PLACE = there",
        variables='PLACE = "there"\n'),
    "rewards": Task(
        "echo 3 >/n",
        verdict="echo '{\"right\": 0.75, \"style\": 0.5}' >/logs/verifier/reward.json",
        reward={"right": 0.75, "style": 0.5}),
    "wrong-solution": Task("echo 41 >/answer; exit 3", "grep -qx 42 /answer",
                           reward={"reward": 0.0}),
    "agent-too-slow": Task("echo begun >/begun; sleep 600; echo 1 >/ended",
                           "test -e /begun && ! test -e /ended", agent="timeout_sec = 3.0\n",
                           error="AgentTimeoutError"),
    "other-user": Task("echo $USER $HOME >/tmp/who", "grep -qx 'pg /var/lib/pg' /tmp/who",
                       agent='user = "pg"\n'),
    "no-network": Task(
        "sed -n 's/^ *\\([a-z0-9]*\\):.*/\\1/p' /proc/net/dev | sort >/devices",
        "test \"$(cat /devices)\" = lo", environment='network_mode = "no-network"\n'),
    "artifacts": Task(
        "mkdir -p /logs/artifacts/deep && seq 1 5000 >/logs/artifacts/deep/numbers && "
        "ln -s /etc/passwd /logs/artifacts/link", "true"),
}  # fmt: skip


def write_task(folder: Path, name: str, image: str) -> Path:
    """Writes a task folder; returns it.

    Args:
        folder: the folder of all tasks.
        name: the name of the task.
        image: the image of the task, or of its Dockerfile.
    """
    task, place = TASKS[name], folder / name
    for part in ("environment", "tests", "solution"):
        (place / part).mkdir(parents=True)
    (place / "instruction.md").write_text(f"{name}\n")
    named = f'docker_image = "{image}"\n' if task.dockerfile is None else ""
    agent = task.agent if "timeout_sec" in task.agent else f"timeout_sec = 60.0\n{task.agent}"
    variables = f"[environment.env]\n{task.variables}" if task.variables else ""
    (place / "task.toml").write_text(
        f'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\n{agent}'
        f"[environment]\nbuild_timeout_sec = 120.0\ncpus = 2\nmemory_mb = 256\n{named}"
        f"{task.environment}{variables}")
    if task.dockerfile is not None:
        (place / "environment/Dockerfile").write_text(f"FROM {image}\n{task.dockerfile}")
    for path, content in task.files.items():
        (place / "environment" / path).write_text(content)
    (place / "solution/solve.sh").write_text(f"#!/bin/bash\n{task.solve}\n")
    verdict = task.verdict or (
        f"if {task.check}; then echo 1; else echo 0; fi >/logs/verifier/reward.txt")
    (place / "tests/test.sh").write_text(f"#!/bin/bash\n{verdict}\n")
    return place
