"""`tangram run`: one command as an action, like `srun`: output streams, the exit code returns."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

from .helpers import ids


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser(
        "run", help="run a command as one action", description="Runs COMMAND as one action on the "
        "job's nodes, in this directory and with this environment. Output streams; the exit status "
        "is the command's (128+N after signal N, 124 after --time, 137 out of memory, 1 or 2 when "
        "it could not run).")
    p.add_argument("-j", "--job", type=ids.job, default="",
                   help="job id (default: TANGRAM_ACCESS, TANGRAM_JOB, the Slurm job we are in, or "
                        "the last job)")
    p.add_argument("-c", "--cpus-per-task", dest="cpus", default="1", metavar="N[-M]",
                   help="CPUs, or the fewest and the most")
    p.add_argument("--mem", default="0", help="memory, such as 512M or 2G")
    p.add_argument("-G", "--gpus", type=int, default=0, help="whole GPUs")
    p.add_argument("-t", "--time", type=float, help="limit on run time in seconds")
    p.add_argument("-J", "--job-name", dest="name", default="", help="name in the accounting")
    p.add_argument("--component", default="", help="only on nodes of this component")
    p.add_argument("-D", "--chdir", default="", help="directory to run in (default: this one)")
    p.add_argument("--untrusted", action="store_true",
                   help="keep the command from your own files (default: it is your own)")
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs it and waits."""
    from ..app.connecting import connect, find_access
    from ..errors import AccessError, ActionFailed, InvalidInput
    from ..slurm.job_environment import without_slurm
    from ..storage.rundir import last_job

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise InvalidInput("run: no command; write `tangram run -c 2 -- pytest -q`")
    try:
        access = find_access(os.environ, args.job)
    except AccessError:
        access = find_access(os.environ, last_job(os.environ))
    with connect(access, name="tangram run") as client:
        future = client.submit(
            command, cpus=_cpus(args.cpus), mem=args.mem, gpus=args.gpus, timeout=args.time,
            name=args.name, component=args.component,
            cwd=args.chdir or ("" if args.untrusted else os.getcwd()),
            env=without_slurm(os.environ), clean_env=False, stdin=_stdin(), retries=0,
            on_output=_emit, trusted=not args.untrusted)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: future.cancel())
        try:
            result = _patient(future)
        except ActionFailed as error:
            print(f"tangram: error: {error}", file=sys.stderr)
            return future.details.exit_code if future.details is not None else error.exit_status
        if result is None:
            print(f"tangram: action {future.id} was cancelled", file=sys.stderr)
            return 128 + signal.SIGINT
    if result.reason:
        print(f"tangram: action {future.id}: {result.state.value}: {result.reason}",
              file=sys.stderr)
    return int(result.exit_code)


def _patient(future: Any) -> Any:
    """The result; ^C cancels the action and waits for its end. None when it was cancelled."""
    import concurrent.futures

    while True:
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
        except concurrent.futures.CancelledError:
            return None


def _cpus(text: str) -> Any:
    from ..errors import InvalidInput

    low, _, high = text.partition("-")
    if not low.isdigit() or (high and not high.isdigit()):
        raise InvalidInput(f"--cpus-per-task: {text!r} is not N or N-M")
    return (int(low), int(high)) if high else int(low)


def _stdin() -> bytes:
    """What is piped in; a terminal or a socket is not read."""
    import stat

    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return b""
    if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
        return sys.stdin.buffer.read()
    return b""


def _emit(stream: int, data: bytes) -> None:
    out = sys.stdout.buffer if stream == 1 else sys.stderr.buffer
    out.write(data)
    out.flush()
