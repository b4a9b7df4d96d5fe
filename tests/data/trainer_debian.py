"""A rank that uses a whole Debian as root would, freezes it and forks it: `FOLDER IMAGE`.

`commands.json` and `files/` in the folder say what is run and what is written before. What the
session said goes to `debian.json`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import tangram_hpc

WAIT_S = 300
FORKS = 64
CHANGE = "echo {0} >/testbed/f && useradd -m fork{0} && echo 'x = {0}' >/home/ann/0/0.py"
LOOK = "cat /testbed/f /home/ann/0/0.py; ls /home; find /home/ann /home/ben -type f | wc -l"


def out(session: tangram_hpc.Session, command: str) -> str:
    return str(session.exec(command).result(WAIT_S).check().text)


def used(session: tangram_hpc.Session, folder: Path) -> list[dict[str, Any]]:
    """Runs the commands; returns the exit status of each, its output, and the owners of files."""
    for path in sorted((folder / "files").iterdir()):
        session.write(f"/session/repo/{path.name}", path.read_bytes()).result(WAIT_S)
    rows = []
    for title, user, paths, line in json.loads((folder / "commands.json").read_text()):
        result = session.exec(line, user=user, timeout=WAIT_S, cwd="/session").result(WAIT_S)
        owners = out(session, f"stat -c '%n %U:%G' {paths}").splitlines() if paths else []
        rows.append({"title": title, "user": user, "status": result.exit_code, "owners": owners,
                     "isolation": result.isolation,
                     "said": (result.text + result.stderr.decode())[-1000:]})
    return rows


def forked(client: tangram_hpc.Client, session: tangram_hpc.Session) -> dict[str, Any]:
    """A snapshot and forks, each of which changes the same files and adds a user of its own."""
    facts: dict[str, Any] = {"before": out(session, LOOK)}
    began = time.monotonic()
    name = session.snapshot().result(WAIT_S)
    facts["snapshot_s"] = time.monotonic() - began
    began = time.monotonic()
    forks = [session.fork() for _ in range(FORKS)]
    for fork in forks:
        fork.opened.result(WAIT_S)
    facts["forks_s"] = time.monotonic() - began
    for change in [fork.exec(CHANGE.format(n)) for n, fork in enumerate(forks)]:
        change.result(WAIT_S).check()
    facts["forks"] = [out(fork, LOOK) for fork in forks]
    out(session, CHANGE.format("later"))
    with client.session(snapshot=name) as first:
        facts["snapshot"] = out(first, LOOK)
    facts["after"] = out(session, LOOK)
    for fork in forks:
        fork.close()
    return facts


def main(folder: Path, image: str) -> None:
    if os.environ["SLURM_PROCID"] != "0":
        return
    with tangram_hpc.connect() as client:
        began = time.monotonic()
        with client.session(image=image, disk="2G") as session:
            session.opened.result(WAIT_S)
            facts: dict[str, Any] = {"opened_s": time.monotonic() - began, "node": session.node,
                                     "rows": used(session, folder)}
            facts |= forked(client, session)
    (folder / "debian.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
