"""A trainer whose sessions are environments of an image. Each role writes what it saw into the
folder, as JSON.

- `agent FOLDER IMAGE` runs in two ranks on two nodes, until rank 0 kills itself;
- `score FOLDER` runs in a step of its own after that;
- `hold FOLDER IMAGE` lasts until the job is ended;
- `ready FOLDER IMAGE` waits until the image is in the stores of both nodes.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tangram_hpc

WAIT_S = 120
GROUP = 8  # sessions of each rank that begin from the prepared environment
TTL_S = 45
BIG, SMALL = 600, 40  # MiB; two big ones do not fit on one node
SETUP = [["sh", "/setup.sh"], "cat /proc/sys/kernel/random/uuid >/testbed/made-by"]
SERVE = "socat TCP-LISTEN:7000,bind=127.0.0.1,fork,reuseaddr SYSTEM:'read x; echo got \\$x' &"


def until(true: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (value := true()):
        assert time.monotonic() < end, f"waited {WAIT_S} s for {what}"
        time.sleep(0.1)
    return value


def barrier(folder: Path, rank: int, name: str) -> None:
    """Lets both ranks go on when both are here."""
    (folder / f"{name}.{rank}").touch()
    until(lambda: (folder / f"{name}.{1 - rank}").exists(), f"the other rank at {name}")


def write(path: Path, facts: dict[str, Any]) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(facts))
    draft.rename(path)


def out(session: tangram_hpc.Session, command: str, **options: Any) -> str:
    return str(session.exec(command, **options).result(WAIT_S).check().text)


def statuses(session: tangram_hpc.Session) -> list[list[Any]]:
    """State and exit code of commands that end in different ways."""
    told = []
    for command, options in (("exit 0", {}), ("exit 7", {}), ("kill -9 $$", {}),
                             ("nothing-here", {}), ("sleep 60", {"timeout": 1}),
                             ("true", {"user": "nobody-here"})):
        result = session.exec(command, **options).result(WAIT_S)
        told.append([command, result.state.value, result.exit_code])
    return told


def use(client: tangram_hpc.Client, image: str) -> tuple[dict[str, Any], str]:
    """What a session of the image can do, and a snapshot of it."""
    facts: dict[str, Any] = {}
    with client.session(image=image, mem=BIG, name="first", background="run") as session:
        facts |= {"node": session.node, "digest": session.image_digest}
        facts["useradd"] = out(session, "useradd --uid 1234 --create-home bob 2>&1; id -u bob")
        out(session, "cd /testbed && echo mine >mine && mkdir of-bob && chown bob of-bob && "
                     "chown 105:105 old && rm folder/in")
        facts["bob"] = out(session, "id -u; echo $HOME; touch /testbed/of-bob/f 2>&1", user="bob")
        facts["owners"] = {entry.name: [entry.uid, entry.gid]
                           for entry in session.listing("/testbed").result(WAIT_S)}
        session.exec(SERVE).result(WAIT_S).check()
        facts["client"] = out(session, "for n in 1 2 3 4 5 6 7 8 9; do "
                              "echo inside | socat - TCP:127.0.0.1:7000 && break; sleep 0.2; done")
        with session.connect(7000, timeout=WAIT_S, wait_s=10) as stream:
            stream.sendall(b"outside\n")
            facts["stream"] = stream.recv(100).decode()
        with session.shell() as shell:
            shell.run("cd /testbed; export WHO=shell; f() { echo $WHO in $PWD; }").result(WAIT_S)
            facts["shell"] = shell.run("f").result(WAIT_S).text
        facts["statuses"] = statuses(session)
        name = session.snapshot().result(WAIT_S)
    return facts, name


def diverge(client: tangram_hpc.Client, name: str) -> dict[str, Any]:
    """Sessions from one snapshot on both nodes, several at once, each with files of its own."""
    big = [client.session(snapshot=name, mem=BIG) for _ in range(2)]
    small = [client.session(snapshot=name, mem=SMALL) for _ in range(8)]
    seen = []
    for number, session in enumerate(big + small):
        session.opened.result(WAIT_S)
        begun = out(session, "cat /testbed/mine; test ! -e /testbed/folder/in; id -u bob; "
                             "stat -c %u:%g /testbed/old /testbed/of-bob")
        session.exec(f"echo {number} >/testbed/mine; echo {number} >/testbed/own-{number}").result(
            WAIT_S).check()
        seen.append([session.node, begun])
    own = [out(s, "cat /testbed/mine; ls /testbed") for s in big + small]
    (info,) = [one for one in client.snapshots() if one.name == name]
    for session in big + small:
        session.close()
    for session in big + small:
        session.closed.result(WAIT_S)
    return {"name": name, "seen": seen, "own": own, "nodes": list(info.nodes),
            "sessions": info.sessions}


def frozen_here() -> int:
    """How often this node has the files of the snapshot; sessions that began from it have changed
    this file. Other folders may go while this looks."""
    found = [Path(here, "mine") for top in Path("/tmp").glob("tangram-node-*")
             for here, _, files in os.walk(top) if here.endswith("/testbed") and "mine" in files]
    count = 0
    for path in found:
        with suppress(FileNotFoundError):  # removed after its session has ended
            count += path.read_text() == "mine\n"
    return count


def group(client: tangram_hpc.Client, image: str) -> list[list[str]]:
    """Node, content and set-up of this rank's sessions of the prepared environment."""
    env = client.prepared(image=image, setup=SETUP, mem=SMALL, files={
        "/setup.sh": "sleep 2; echo ready >/testbed/ready; chown 105 /testbed/ready"})
    sessions = [client.session(snapshot=env, mem=SMALL) for _ in range(GROUP)]
    told = []
    for number, session in enumerate(sessions):
        session.write("/testbed/number", str(number)).result(WAIT_S)
    for session in sessions:
        told.append([session.node, env, *out(
            session, "cat /testbed/made-by /testbed/ready; cat /testbed/number").split()])
        session.close()
    return told


def agent(folder: Path, image: str) -> None:
    rank = int(os.environ["SLURM_PROCID"])
    with tangram_hpc.connect(name=f"agent{rank}") as client:
        facts: dict[str, Any] = {"host": os.uname().nodename}
        if rank == 0:
            facts["use"], name = use(client, image)
            facts["diverge"] = diverge(client, name)
        barrier(folder, rank, "group")
        facts["frozen"] = frozen_here()
        facts["group"] = group(client, image)
        write(folder / f"rank{rank}.json", facts)
        barrier(folder, rank, "grouped")
        if rank == 0:
            episode = client.session(snapshot=name, mem=SMALL, name="episode", shared=True,
                                     outlives=True, ttl_s=TTL_S,
                                     files={"/testbed/test.sh": "test $(cat /testbed/answer) = 42"})
            out(episode, "printf 42 >/testbed/answer; chown bob /testbed/answer")
            begun = threading.Event()  # a rank that is killed may lose what it has only submitted
            episode.exec("echo begun; sleep 600", name="sleep", on_output=lambda *_: begun.set())
            assert begun.wait(WAIT_S)  # it runs while the rank is killed
            handle = episode.handle()
            write(folder / "handle.json", {"name": handle.name, "token": handle.token,
                                           "id": episode.id, "node": episode.node})
            os.kill(os.getpid(), signal.SIGKILL)
        until((folder / "scored.json").exists, "the scorer")
        write(folder / "after.json", {"snapshots": len(client.snapshots())})


def ready(folder: Path, image: str) -> None:
    """A session on each node, of an image that is in the nodes' stores."""
    if os.environ["SLURM_PROCID"] != "0":
        return
    with tangram_hpc.connect() as client:
        until((folder / "pulled").exists, "the pull")
        begun = time.monotonic()
        both = [client.session(image=image, mem=BIG) for _ in range(2)]
        read = [out(session, "cat /testbed/old") for session in both]
        write(folder / "ready.json", {
            "open_s": time.monotonic() - begun, "read": read,
            "nodes": sorted(session.node for session in both),
            "digests": [session.image_digest for session in both]})


def hold(folder: Path, image: str) -> None:
    """A session on each node, with files of other users and a process that does not want to end."""
    with tangram_hpc.connect() as client:
        if os.environ["SLURM_PROCID"] == "0":
            held = [client.session(image=image, mem=BIG) for _ in range(2)]
            for session in held:
                out(session, "mkdir -m 700 kept && touch kept/f && chown -R 105:105 kept")
            for session in held:
                session.exec("trap '' TERM; sleep 600; sleep 600", user="pg")
            write(folder / "up.json", {"nodes": sorted(session.node for session in held)})
        time.sleep(600)


def score(folder: Path) -> None:
    known = json.loads((folder / "handle.json").read_text())
    facts: dict[str, Any] = {"host": os.uname().nodename}
    with tangram_hpc.connect(name="scorer") as client:
        with client.attach(name=known["name"], token=known["token"]) as session:
            facts["answer"] = session.read("/testbed/answer").result(WAIT_S).decode()
            facts["owner"] = session.stat("/testbed/answer").result(WAIT_S).uid
            facts["passed"] = session.exec("sh /testbed/test.sh").result(WAIT_S).ok
            facts["id"], facts["node"] = session.id, session.node
            facts["closed"] = session.closed.result(WAIT_S)
        try:
            client.attach(name=known["name"], token=known["token"])
        except tangram_hpc.SessionLost as error:
            facts["late"] = str(error)
    write(folder / "scored.json", facts)


if __name__ == "__main__":
    role = {"agent": agent, "hold": hold, "ready": ready, "score": score}[sys.argv[1]]
    role(Path(sys.argv[2]), *sys.argv[3:])
