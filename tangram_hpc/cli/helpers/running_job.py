"""How a verb that shows a running job reaches its broker, and how it shows the job again and again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...client.client import Client
    from ...errors import BrokerUnreachable


def user_of(job: str) -> str:
    """Returns the name under which the user who runs a job is accounted, or the number of another
    user without a name; empty if the job is gone. See `connect_to` for `job`.

    Raises:
        AccessError: no job was found.
    """
    import pwd

    from ...config.user_name import user_name

    try:
        owner = os.stat(_access(job)).st_uid
    except OSError:
        return ""
    if owner == os.getuid():
        return user_name()  # which may be the environment's, as in the job's accounting
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def connect_to(job: str | None, name: str) -> Client:
    """Returns a client of a job: of the one that is named, else of the current or the last one.

    Args:
        job: id of the job; None for the default.
        name: the name under which the broker knows the client.

    Raises:
        AccessError: no job was found.
        BrokerUnreachable: the job's broker does not answer.
    """
    from ...app.connecting import connect

    return connect(_access(job or ""), name=name)


def _access(job: str) -> Path:
    from ...app.broker_location import find_access
    from ...errors import AccessError
    from ...storage.rundir import last_job

    try:
        return find_access(os.environ, job)
    except AccessError:
        return find_access(os.environ, job or last_job(os.environ))


def answer_of(client: Client, what: str, argument: str = "") -> Any:
    """Returns the broker's answer to a query.

    Raises:
        InvalidInput: the broker refuses the query, or is of a release that does not know it.
    """
    from ...errors import InvalidInput

    answer = client.ask(what, argument)
    if "error" in answer:
        raise InvalidInput(answer["error"])
    return answer


def will_ask_again(client: Client, error: BrokerUnreachable, once: bool = False) -> str:
    """Returns what a verb says that goes on although an answer did not come in time: the broker
    may be stopped for a moment, or the next one may be starting.

    Args:
        client: the client of the job.
        error: what the query raised.
        once: whether the verb asks only once.

    Raises:
        BrokerUnreachable: the verb asks only once, or the client has given its broker up.
    """
    if once or client.failure is not None:
        raise error
    return f"tangram: {error}; asking again"


def seconds(text: str) -> float:
    """Parses the time between two looks, in seconds. It is used as `type=` of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return value


def repeat(client: Client, show: Callable[[], None], every_s: float | None,
           stamped: bool = True) -> int:
    """Shows once, or every so many seconds until ^C, each time under the time of day as squeue
    prints it. Returns the exit status.

    Raises:
        BrokerUnreachable: the only answer did not come in time, or no answer will come any more.
    """
    from ...errors import BrokerUnreachable

    while True:
        if every_s is not None and stamped:
            print(time.strftime("%a %b %d %H:%M:%S %Y"))
        try:
            show()
        except BrokerUnreachable as error:
            print(will_ask_again(client, error, every_s is None), file=sys.stderr, flush=True)
        if every_s is None:
            return 0
        print(end="\n" if stamped else "", flush=True)
        time.sleep(every_s)
