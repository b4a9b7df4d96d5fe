"""A trainer whose broker is killed again and again: it keeps commands, functions, named work and a
session busy until GO appears, and one command runs all the time. Each attempt leaves a line in
EFFECTS. At the end each rank writes what became of every action to OUT.RANK.

Arguments: OUT, GO and EFFECTS.
"""

import json
import os
import sys
import threading
import time

import tangram_hpc

out, go, effects = sys.argv[1], sys.argv[2], os.path.abspath(sys.argv[3])
wrong: list[str] = []
ends: dict[str, list[float]] = {}  # when results came, by kind of action


def noted(path: str, name: str) -> str:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{name}\n".encode())
    os.close(fd)
    return name


def keep_busy(kind: str, ask) -> None:
    """Runs actions of this kind one after another."""
    ends[kind], count = [], 0
    while not os.path.exists(go):
        count += 1
        name = f"{rank}.{kind}.{count}"
        try:
            told = ask(name).result(200)
        except (tangram_hpc.TangramError, OSError, TimeoutError) as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            return
        text = told if isinstance(told, str) else told.text.strip()
        if text != name:
            wrong.append(f"{name}: it got {text!r:.80}")
        ends[kind].append(time.time())


def line(name: str) -> str:
    return f"echo {name} >> {effects}; sleep 0.1; echo {name}"


with tangram_hpc.connect(name="broker dies") as client:
    rank = client.rank
    session = client.session(mem=10, trusted=True)
    session.write("state", "kept").result(100)
    runs = client.submit(f"echo {rank}.runs >> {effects}; until [ -e {os.path.abspath(go)} ]; do "
                         f"sleep 0.2; done; echo {rank}.runs", trusted=True)
    kinds = {"command": lambda name: client.submit(line(name), trusted=True),
             "function": lambda name: client.submit(noted, effects, name),
             "named": lambda name: client.submit(line(name), trusted=True, once=name),
             "session": lambda name: session.exec(line(name))}
    threads = [threading.Thread(target=keep_busy, args=one) for one in kinds.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = session.exec("cat state").result(100).text
    whole = runs.result(100).text.strip() == f"{rank}.runs"
    with open(f"{out}.{rank}.part", "w") as file:
        json.dump({"wrong": wrong, "ends": ends, "kept": kept, "whole": whole,
                   "attempt": runs.details.attempt, "via": client.via}, file)
    os.rename(f"{out}.{rank}.part", f"{out}.{rank}")
