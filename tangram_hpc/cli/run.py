"""`tangram run`: runs one command as an action, as `srun` runs one as a job step.

The command's output is printed as it comes, and its exit status is returned.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

from .helpers import ids
from .helpers.end_signals import call_at_end
from .helpers.printable import printable
from .helpers.running_job import connect_to
from .helpers.times import time_limit

WAITS_S = 1.0  # srun says after about this time that its job waits


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "run", help="run a command as one action", description="Runs COMMAND as one action on the "
        "job's nodes, in the current directory and with the current environment, and prints its "
        "output as it comes. The exit status is the command's own: 128+N after signal N, 124 after "
        "--time, 137 when it ran out of memory, and 1 or 2 when it could not be run.")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id (default: TANGRAM_ACCESS, TANGRAM_JOB, the current Slurm job or "
                        "the last job)")
    p.add_argument("-c", "--cpus-per-task", dest="cpus", default="1", metavar="N[-M]",
                   help="number of CPUs, or the smallest and the largest number (default: 1)")
    p.add_argument("--mem", default="0",
                   help="memory of the action, such as 512M or 2G (default: no request)")
    p.add_argument("-G", "--gpus", type=int, default=0, help="number of whole GPUs (default: 0)")
    p.add_argument("-t", "--time", type=time_limit, metavar="TIME",
                   help="time limit in seconds, or as srun takes it with a : or -, such as 1:30 "
                        "(minutes:seconds) or 1-12 (days-hours) (default: none)")
    for short, word in (("-n", "--ntasks"), ("-N", "--nodes")):
        p.add_argument(short, word, type=_one, metavar="1",
                       help="1 is accepted, as scripts for srun name it: an action is one task on "
                            "one node")
    p.add_argument("-J", "--job-name", dest="name", default="",
                   help="name of the action in the accounting")
    p.add_argument("-p", "--component", "--partition", default="",
                   help="run only on nodes of this component")
    p.add_argument("-D", "--chdir", default="",
                   help="working directory of the command (default: the current one)")
    p.add_argument("--untrusted", action="store_true",
                   help="isolate the command from your own files (default: run it as your own "
                        "code)")
    p.add_argument("--pty", action="store_true",
                   help="run the command on a terminal and connect this one with it, as `srun "
                        "--pty` does; keys go to the command, ^C too")
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs the command and waits for it; returns its exit status."""
    from ..errors import InvalidInput
    from ..slurm.job_environment import without_slurm

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise InvalidInput("run: it needs a command, as in `tangram run -c 2 -- pytest -q`")
    with connect_to(args.job, "tangram run") as client:
        options = {
            "cpus": _cpus(args.cpus), "mem": args.mem, "gpus": args.gpus, "timeout": args.time,
            "name": args.name, "component": args.component,
            "cwd": args.chdir or ("" if args.untrusted else os.getcwd()),
            "env": without_slurm(os.environ), "clean_env": False, "trusted": not args.untrusted}
        return (_on_terminal if args.pty else _streamed)(client, command, options)


def _streamed(client: Any, command: list[str], options: dict[str, Any]) -> int:
    """Runs the command and prints its output as it comes; returns its exit status.

    Raises:
        OSError: its output cannot be written any more, since the reader is gone or the disk is
            full; it has been cancelled.
    """
    from ..errors import ActionFailed

    started: list[Any] = []  # the future
    failed: list[OSError] = []

    def emit(stream: int, data: bytes) -> None:  # on the client's thread
        if failed:
            return
        try:
            _emit(stream, data)
        except OSError as error:
            failed.append(error)
            for future in started:
                future.cancel()

    future = client.submit(command, stdin=_stdin(), retries=0, on_output=emit, **options)
    started.append(future)
    if failed:
        future.cancel()
    call_at_end(future.cancel)
    try:
        _say_if_it_waits(client, future)
        result = _patient(future)
        if failed:
            raise failed[0]
        return _status(future, result)
    except ActionFailed as error:
        print(f"tangram: error: {printable(str(error), lines=True)}", file=sys.stderr)
        return future.details.exit_code if future.details is not None else error.exit_status


def _on_terminal(client: Any, command: list[str], options: dict[str, Any]) -> int:
    """Runs the command on a terminal that is connected with this one; returns its exit status."""
    from .helpers import own_terminal

    rows, cols = own_terminal.size()
    with client.pty(command, rows=rows, cols=cols, echo=True, **options) as pty:
        call_at_end(pty.close)
        own_terminal.connect(pty)
        result = _patient(pty.future)
    return _status(pty.future, result)


def _status(future: Any, result: Any) -> int:
    """Prints why the action ended and how much output is missing, if that needs saying; returns
    the exit status.
    """
    if result is None:
        print(f"tangram: action {future.id} was cancelled", file=sys.stderr)
        return 128 + signal.SIGINT
    if result.reason:
        print(f"tangram: action {future.id}: {result.state.value}: {printable(result.reason)}",
              file=sys.stderr)
    if any(result.cut):
        print(f"tangram: action {future.id}: {sum(result.cut)} bytes of its output were not "
              "printed; let it write into a file, or raise output_max", file=sys.stderr)
    return int(result.exit_code)


def _patient(future: Any) -> Any:
    """Returns the result, or None if the action was cancelled. ^C cancels it and waits for its end.
    """
    import concurrent.futures

    while True:
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
        except concurrent.futures.CancelledError:
            return None


def _say_if_it_waits(client: Any, future: Any) -> None:
    """Prints why the action has not begun, if it has not after `WAITS_S`. ^C cancels it."""
    import concurrent.futures

    from ..errors import TangramError

    try:
        concurrent.futures.wait([future], WAITS_S)
        waiting = () if future.done() else client.ask("pending", future.id).get("pending", ())
    except KeyboardInterrupt:
        future.cancel()
        return
    except TangramError:
        return  # the future tells why the broker does not answer
    for one in waiting:
        if one["id"] == future.id:  # a broker of an earlier release tells all that wait
            print(f"tangram: action {future.id} is pending ({one['reason']}); `tangram explain -j "
                  f"{client.job} {future.id}` says what it waits for", file=sys.stderr, flush=True)


def _one(text: str) -> int:
    """Parses the number of tasks or nodes. It is used as `type=` of an argument."""
    if text.lstrip("0") != "1":
        raise argparse.ArgumentTypeError(
            f"{text!r}: an action is one task on one node; name 1 or leave it out, submit several "
            "actions, or ask for CPUs (-c) and start mpirun")
    return 1


def _cpus(text: str) -> Any:
    from ..errors import InvalidInput

    low, _, high = text.partition("-")
    if not low.isdecimal() or (high and not high.isdecimal()):
        raise InvalidInput(f"--cpus-per-task: {text!r} must be a number N or a range N-M")
    return (int(low), int(high)) if high else int(low)


def _stdin() -> bytes:
    """Returns the content of a pipe or a file at stdin; a terminal or a socket is not read."""
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
