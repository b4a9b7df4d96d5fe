"""Takes the screenshots of `tangram queue` and `tangram top` of a small real job, as SVG.

    python docs/pictures/screens.py       # half a minute; needs the extra `top`

The job has sandboxes, a service on stand-ins for GPUs, and an endpoint. Its times differ from run
to run, so the pictures are not compared with a new run; tests/cli/test_watching.py checks that they
have today's headings.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tangram_hpc import LocalCluster, connect
from tangram_hpc.cli import main
from tangram_hpc.cli.views.top_frame import Line, frame

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, SECONDS = 80, 24, 20.0


def screenshot(lines: list[Line], title: str, path: Path) -> None:
    """Writes lines of a terminal as a picture, which names no font of another host."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text(line.text, style=line.style, no_wrap=True, overflow="crop"))
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    path.write_text(console.export_svg(title=title, code_format=form, unique_id=path.stem))


def sleep(cluster: Any, name: str, seconds: float, **more: Any) -> Any:
    """Submits a command that takes so many seconds."""
    return cluster.submit(["sleep", f"{seconds:.2f}"], trusted=True, name=name, **more)


def trajectory(cluster: Any, chance: random.Random, endpoint: Any, until: float) -> None:
    """An agent: a session in which tools run, a search now and then, and a reward at the end."""
    while time.monotonic() < until:
        with cluster.session(trusted=True, mem="64M") as session:
            for _ in range(3):
                session.exec(["sleep", f"{chance.uniform(0.05, 0.6):.2f}"], name="shell").result()
            with endpoint.slot("search"):
                time.sleep(chance.uniform(0.1, 0.4))
        sleep(cluster, "pytest", chance.uniform(0.3, 1.2), cpus=(1, 2, 4)).result()
        cluster.call("judge", "score", texts=["an answer"]).result()


def shoot() -> None:
    """Runs the job and takes both pictures."""
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as home, LocalCluster(
            cpus=8, devices="fake:2", home=home, job="4711") as cluster:
        cluster.register_service("judge", {"backend": "fake"})
        endpoint = cluster.register_endpoint("web-search", concurrency=4)
        until = time.monotonic() + SECONDS
        agents = [threading.Thread(target=trajectory, args=(cluster, random.Random(n), endpoint,
                                                            until)) for n in range(12)]
        for agent in agents:
            agent.start()
        time.sleep(SECONDS - 4)
        burst = [sleep(cluster, "build", chance.uniform(1, 2), cpus=(1, 2)) for _ in range(15)]
        time.sleep(0.5)
        with connect(str(cluster.access)) as watcher:  # a client of its own, as top is
            answer = watcher.ask("top")
        os.environ["TANGRAM_ACCESS"] = str(cluster.access)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main(["queue"])
        for one in [*burst, *agents]:
            one.join() if isinstance(one, threading.Thread) else one.result()
    screenshot(frame(answer, WIDTH, HEIGHT), "tangram top", HERE / "top.svg")
    rows = printed.getvalue().splitlines()
    screenshot([Line(row, "" if n else "bold") for n, row in enumerate(rows[:HEIGHT])],
               "tangram queue", HERE / "queue.svg")


if __name__ == "__main__":
    shoot()
