"""Rehearses the main job in small: a broker, a worker and a client here, and one command in a
sandbox.

The rehearsal is a program such as a user would write. It runs in a process of its own, with the
user's settings, in a folder that is removed afterwards, and lends one CPU for about a second.
"""

from __future__ import annotations

import json
import sys

from ..storage.rundir import tangram_home
from .check import CheckContext, CheckSpec, Finding, fail, ok, warn
from .deadline import run_command
from .storage import trial_folder

_SECONDS = 60.0
_PROGRAM = """
import json, sys
from tangram_hpc import LocalCluster
with LocalCluster(cpus=1, home=sys.argv[1], warm=0) as client:
    walled = bool(client.ask("nodes")["nodes"][0]["untrusted"])
    done = client.submit(["sh", "-c", "echo $((6 * 7))"], trusted=not walled, timeout=20).result()
    print(json.dumps({"text": done.text, "state": done.state.value, "reason": done.reason,
                      "isolation": done.isolation, "enforcement": done.enforcement,
                      "walled": walled}))
"""


def run(context: CheckContext) -> Finding:
    """Runs the rehearsal and checks its command's output."""
    remedy = "correct the other checks that fail first; if none fails, `python -c 'from " \
             "tangram_hpc import LocalCluster; LocalCluster(cpus=1).start()'` names its log"
    with trial_folder(tangram_home(context.environ)) as folder:
        output = run_command([sys.executable, "-c", _PROGRAM, str(folder)], context.environ,
                             _SECONDS)
    lines = [line for line in output.out.splitlines() if line.startswith("{")]
    if output.code or not lines:
        return fail(f"an embedded run does not come up: {output.last}", remedy)
    row = json.loads(lines[-1])
    if row["text"] != "42\n":
        return fail(f"its command ended as {row['state']} {row['reason']}".rstrip(), remedy)
    text = f"broker, worker, client and one command in {output.seconds:.1f} s (isolation " \
           f"{row['isolation']}, enforcement {row['enforcement']})"
    if not row["walled"]:
        return warn(f"{text}; the command had to be trusted", "see `sandboxes`")
    return ok(text)


CHECKS = (CheckSpec("embedded run", run, 80.0),)
