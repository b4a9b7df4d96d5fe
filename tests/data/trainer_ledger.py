"""A trainer for tests of faults: submits all the time, in sessions and without, until the file GO
is there or its broker is lost; then writes to OUT what became of every single action."""

import collections
import concurrent.futures
import json
import os
import sys
import threading
import time

import tangram_hpc
from tangram_hpc.errors import TangramError

out, go, sessions = sys.argv[1], sys.argv[2], int(sys.argv[3])
ends: list[dict] = []  # of every action: how it ended for us, and when
began = time.time()
lock = threading.Lock()
submitted = collections.Counter()


def settle(kind, future, text, asked) -> str:
    """Waits for an action; notes how it ended. A result with another text than its own is wrong."""
    note = {"kind": kind, "asked": asked - began}
    try:
        result = future.result(600)
        note |= {"end": "result", "state": str(result.state.value), "right": result.text == text}
    except concurrent.futures.CancelledError:
        note |= {"end": "cancelled"}
    except TangramError as error:
        note |= {"end": "error", "state": type(error).__name__, "text": str(error)[:200]}
    details = getattr(future, "details", None) if note["end"] == "result" else None
    if details is not None:
        note |= {"node": details.node, "attempt": details.attempt}
    note["at"] = time.time() - began
    with lock:
        ends.append(note)
    return note["end"] + note.get("state", "")


def over() -> bool:
    return os.path.exists(go) or lost.is_set()


def plain(client, number: int) -> None:
    while not over():
        with lock:
            submitted["plain"] += 1
            n = submitted["plain"]
        asked = time.time()
        try:
            future = client.submit(f"sleep 0.4; echo {n}", name="plain")
        except TangramError as error:
            ends.append({"kind": "plain", "asked": asked - began, "end": "error",
                         "state": type(error).__name__, "text": str(error)[:200],
                         "at": time.time() - began})
            lost.set()
            return
        if "BrokerUnreachable" in settle("plain", future, f"{n}\n", asked):
            lost.set()


def in_session(client, number: int) -> None:
    while not over():
        count = 0
        try:
            session = client.session(name=f"s{number}", mem=5)
            while not over():
                count += 1
                with lock:
                    submitted["session"] += 1
                asked = time.time()
                future = session.exec("echo x >> log; sleep 0.2; wc -l < log")
                ended = settle("session", future, f"{count}\n", asked)
                if not ended.startswith("result"):
                    break
            session.close()
        except TangramError as error:  # of a session that is gone, before anything was submitted
            if "Unreachable" in type(error).__name__:
                lost.set()
            time.sleep(0.2)


lost = threading.Event()
with tangram_hpc.connect(name="ledger") as client:
    threads = [threading.Thread(target=plain, args=(client, n)) for n in range(6)]
    threads += [threading.Thread(target=in_session, args=(client, n)) for n in range(sessions)]
    for thread in threads:
        thread.start()
    print("ledger is open", flush=True)
    for thread in threads:
        thread.join()
with open(f"{out}.part", "w") as file:
    json.dump({"submitted": dict(submitted), "ends": ends, "began": began, "via": client.via}, file)
os.rename(f"{out}.part", out)
