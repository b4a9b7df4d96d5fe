"""`tangram top`: shows live what a job does, as top shows a machine. It changes nothing.

On a terminal the package Rich draws the frames. Elsewhere, with -b, and on a terminal that cannot
move its cursor, the same frames are printed one after the other as plain text, for which Rich is
not needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..helpers import ids, running_job
from ..helpers.end_signals import ends_in_order
from ..helpers.printable import printable_answer
from .top_frame import Line, frame

if TYPE_CHECKING:
    from ...client.client import Client

_CANNOT_MOVE = ("dumb", "unknown")  # values of TERM with which Rich draws nothing at all
_QUIT = (b"q", b"Q", b"\x1b", b"")  # the last one is the end of stdin


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "top", help="show live what a running job does",
        description="Shows what the job holds and lends, the rate of actions and their mean ACT, "
                    "what waits for which reason, services, endpoints, nodes and the largest "
                    "running actions. q or ^C ends it. It is read-only.")
    p.add_argument("job", nargs="?", type=ids.job, metavar="JOB",
                   help="id of the job (default: as for `tangram run`)")
    p.add_argument("-j", "--job", dest="named", type=ids.job, metavar="JOB",
                   help="the same as JOB")
    p.add_argument("-d", "--delay", type=running_job.seconds, default=1.0, metavar="SECONDS",
                   help="time between two frames (default: 1)")
    p.add_argument("-b", "--batch", action="store_true",
                   help="print plain frames, as for a pipe")
    p.add_argument("-n", "--iterations", type=int, default=0, metavar="N",
                   help="end after N frames (default: go on)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Shows frames until the user ends it; returns the exit status."""
    from ...errors import InvalidInput

    if args.iterations < 0:
        raise InvalidInput(f"--iterations: {args.iterations} is below 0")
    plain = (args.batch or not sys.stdout.isatty()
             or os.environ.get("TERM", "").lower() in _CANNOT_MOVE)
    live = None if plain else _rich()
    with running_job.connect_to(args.named or args.job, "tangram top") as client:
        if plain:
            _print_frames(client, args)
        else:
            _show_live(client, args, live)
    return 0


def _rich() -> Any:
    """Returns the package that draws on terminals.

    Raises:
        MissingExtra: it is not installed.
    """
    from ...errors import MissingExtra, how_to_install

    try:
        import rich.console
        import rich.live
        import rich.text
    except ImportError:
        raise MissingExtra("top: drawing on a terminal needs the package rich: "
                           f"{how_to_install('top')}; or use `tangram top -b`") from None
    return rich


def _ask(client: Client) -> dict[str, Any]:
    answer: dict[str, Any] = printable_answer(running_job.answer_of(client, "top"))
    return answer


def _print_frames(client: Client, args: argparse.Namespace) -> None:
    """Prints frames of any height, with an empty line between them."""
    from ...errors import BrokerUnreachable

    width = shutil.get_terminal_size((80, 24)).columns
    count = 0
    while True:
        try:
            lines = frame(_ask(client), width, 0)
        except BrokerUnreachable as error:
            said = running_job.will_ask_again(client, error, args.iterations == 1)
            print(said, file=sys.stderr, flush=True)
            continue
        print("\n".join(line.text.rstrip() for line in lines), flush=True)
        count += 1
        if count == args.iterations:
            return
        time.sleep(args.delay)
        print()


def _show_live(client: Client, args: argparse.Namespace, rich: Any) -> None:
    """Draws frames on the whole terminal until a key ends it."""
    from ...errors import BrokerUnreachable

    console = rich.console.Console(highlight=False)
    with (ends_in_order(), _keys() as pressed,
          rich.live.Live(console=console, screen=True, auto_refresh=False) as live):
        count, lines = 0, list[Line]()
        while True:
            try:
                lines = frame(_ask(client), console.width, console.height)
                count += 1
            except BrokerUnreachable as error:  # the last frame stays, with another title
                said = running_job.will_ask_again(client, error, args.iterations == 1)
                lines = [Line(said, "reverse"), *lines[1:]]
            live.update(_drawn(lines, rich), refresh=True)
            if count == args.iterations or pressed(args.delay):
                return


def _drawn(lines: list[Line], rich: Any) -> Any:
    """Returns the lines as Rich draws them; nothing in them is read as markup."""
    return rich.console.Group(*(rich.text.Text(line.text, style=line.style, no_wrap=True,
                                               overflow="crop") for line in lines))


@contextmanager
def _keys() -> Iterator[Any]:
    """Reads keys without Enter and without an echo for a while. Gives a function that waits so many
    seconds, and returns whether a key that ends the program was pressed meanwhile.
    """
    import select
    import termios
    import tty

    if not sys.stdin.isatty():
        yield time.sleep
        return

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([0], [], [], left)[0] and os.read(0, 1) in _QUIT:
                return True
        return False

    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield pressed
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
