"""`tangram clean`: lists the folders of jobs, and removes those that are old or too large."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...storage.job_folders import JobFolder, SlurmQueue

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "clean", help="list the folders of jobs, and remove old ones",
        description="Lists the folders of jobs below $TANGRAM_HOME with what they take on the "
                    "disk, and removes those that are named here, that are old, or that take "
                    "too much. With a folder go the job's accounting, its logs and the results of "
                    "its named actions. The folder of a job that runs, or that Slurm has in its "
                    "queue, always stays; that of a job whose cluster cannot be asked goes only "
                    "if it is named.")
    p.add_argument("jobs", nargs="*", metavar="JOB", help="remove the folders of these jobs")
    p.add_argument("--older-than", type=_amount(_SECONDS, "time", "30d"), metavar="TIME",
                   help="remove folders that were not changed for so long, such as 30d, 12h")
    p.add_argument("--keep", type=_amount(_BYTES, "size", "20G"), metavar="SIZE",
                   help="remove the oldest folders until all together take no more than this, such "
                        "as 20G")
    p.add_argument("-n", "--dry-run", action="store_true", help="remove nothing, and say what "
                                                                "would be removed")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Lists and removes; returns 1 if a folder that was to be removed stays."""
    from ...storage.job_folders import job_folders, outdated, slurm_ids, sweep_removed
    from ...storage.rundir import tangram_home

    home = tangram_home(os.environ)
    folders = job_folders(home, _queue(slurm_ids(home)))
    chosen = outdated(folders, time.time_ns(),
                      None if args.older_than is None else args.older_than * 10**9, args.keep)
    chosen += [each for each in _named(folders, args.jobs) if each not in chosen]
    done = {each.path.name: _remove(each, args.dry_run) for each in chosen}
    if not args.dry_run:
        sweep_removed(home)
    _print(folders, done, args.json)
    return int(any(text.startswith("stays") for text in done.values()))


def _remove(folder: JobFolder, dry_run: bool) -> str:
    """Removes a folder if that may be, and returns what was done, for the list."""
    from ...errors import InvalidInput
    from ...storage.job_folders import RUNS, remove_job_folder

    if folder.needed:
        return "stays: its job runs" if folder.state == RUNS else "stays: Slurm has its job"
    if dry_run:
        return "would be removed"
    try:
        gone = remove_job_folder(folder.path)
    except InvalidInput as error:
        return f"stays: {error}"
    return "removed" if gone else "stays: its job has just been started"


def _named(folders: list[JobFolder], jobs: list[str]) -> list[JobFolder]:
    """Returns the folders of jobs that are given as ID or ID@CLUSTER."""
    from ...errors import InvalidInput

    found = []
    for job in jobs:
        own = [each for each in folders if each.path.name == job]
        own = own or [each for each in folders if each.path.name.partition("@")[0] == job]
        if len(own) != 1:
            there = ", ".join(each.path.name for each in own)
            raise InvalidInput(f"JOB: {job} has the folders {there}; name one of them" if own else
                               f"JOB: {job} has no folder; `tangram clean` lists all")
        found += own
    return found


def _queue(ids: list[int]) -> SlurmQueue | None:
    """Returns what Slurm has of these jobs, by one `scontrol` and one `squeue`; None if it cannot
    be asked.
    """
    from ...ports import SlurmRejected, SlurmTransient
    from ...slurm.commands import Commands
    from ...storage.job_folders import SlurmQueue

    async def ask() -> SlurmQueue:
        slurm = Commands(os.environ)
        cluster, views = await slurm.cluster(), await slurm.query(ids, ["-"])
        return SlurmQueue(cluster, frozenset(view.job for view in views if not view.over))

    if not ids:
        return None
    try:
        return asyncio.run(ask())
    except (SlurmRejected, SlurmTransient) as why:
        print(f"tangram: {why}; the folders of Slurm jobs stay unless they are named",
              file=sys.stderr)
        return None


def _print(folders: list[JobFolder], done: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"folders": [
            {"job": each.path.name, "path": str(each.path), "state": each.state,
             "bytes": each.size, "changed_s": round(each.seen_ns / 1e9, 3),
             "done": done.get(each.path.name, "")} for each in folders],
            "bytes": sum(each.size for each in folders)}))
        return
    width = max((len(each.path.name) for each in folders), default=3)
    print(f"{'JOB':<{width}} {'STATE':<10} {'SIZE':>7} {'CHANGED':<16}")
    for each in folders:
        changed = time.strftime("%Y-%m-%dT%H:%M", time.localtime(each.seen_ns / 1e9))
        print(f"{each.path.name:<{width}} {each.state:<10} {_size(each.size):>7} {changed:<16} "
              f"{done.get(each.path.name, '')}".rstrip())
    gone = [each for each in folders if "removed" in done.get(each.path.name, "")]
    words = "would be removed" if "would be removed" in done.values() else "removed"
    print(f"{len(folders)} folders, {_size(sum(each.size for each in folders))}; {words}: "
          f"{len(gone)}, {_size(sum(each.size for each in gone))}")


def _size(count: int) -> str:
    for unit in ("T", "G", "M"):
        if count >= _BYTES[unit]:
            return f"{count / _BYTES[unit]:.1f}{unit}"
    return f"{count / 1024:.0f}K"


def _amount(units: dict[str, int], kind: str, example: str) -> Callable[[str], int]:
    """Returns a parser of whole numbers with a unit, for argparse's `type=`."""
    def parse(text: str) -> int:
        if not text[:-1].isdecimal() or text[-1] not in units:
            raise argparse.ArgumentTypeError(f"{text!r} is no {kind}; give a number and one of "
                                             f"{', '.join(units)}, such as {example}")
        return int(text[:-1]) * units[text[-1]]
    return parse
