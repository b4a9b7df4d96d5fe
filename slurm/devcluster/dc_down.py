"""`down`: ends the cluster and leaves nothing of it. Invariants of this module:

- it ends, unmounts and removes only what the record or `dc_procs` says is the cluster's;
- without a record it does nothing, and that is no error: a second `down` is harmless;
- the prefix goes last, so that a `down` that failed can be run again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path

import dc_net
import dc_procs
from dc_base import SAFE_PATH, Cluster, ClusterError, User, require_root, say

STORES = ("slurmdbd", "mariadbd", "munged")


def down(prefix: Path) -> None:
    require_root()
    cluster = Cluster.load(prefix)
    if cluster is None:
        say(f"no cluster at {prefix}: nothing to do")
        return
    take_down(cluster)
    say(f"{cluster.name} is down, {prefix} is removed")


def take_down(c: Cluster) -> None:
    c.ready = False
    c.save()
    created = [u for u in c.users if u.created]
    for user in created:
        learn_uid(user)
    end_processes(c)
    for user in created:
        if user.uid > 0:
            remove_shared_memory(user.uid)
            remove_user(user)
    if c.netns:
        dc_net.unplug(c)
    if c.cgroups:
        remove_cgroups(c)
    unmount(c)
    shutil.rmtree(c.root)


def learn_uid(user: User) -> None:
    """Finds the uid of a user whose `up` was killed within useradd: ours if its home is ours."""
    with contextlib.suppress(KeyError):
        who = pwd.getpwnam(user.name)
        if user.uid < 0 and who.pw_dir == user.home:
            user.uid = who.pw_uid


def end_processes(c: Cluster) -> None:
    """Ends Slurm first, then steps and user processes, the databases last; then checks again."""
    stores = {d["pid"] for d in c.daemons if d["name"] in STORES}
    found = dc_procs.find(c)
    dc_procs.end(found["daemons"] - stores, 3)
    dc_procs.end(dc_procs.find(c)["work"], 1)
    dc_procs.end(found["daemons"] & stores, 3)
    for _ in range(50):
        left = set().union(*dc_procs.find(c).values())
        if not left:
            return
        dc_procs.end(left, 0)
        time.sleep(0.1)
    raise ClusterError(f"processes {sorted(left)} of {c.name} do not end: run `down` again")


def remove_shared_memory(uid: int) -> None:
    for path in Path("/dev/shm").iterdir():
        try:
            if path.lstat().st_uid != uid:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            continue


def remove_user(user: User) -> None:
    """Removes the user that `up` created, if its uid is the same; /etc/passwd may be locked."""
    for _ in range(30):
        try:
            who = pwd.getpwnam(user.name)
            if who.pw_uid != user.uid or who.pw_dir != user.home:
                return
        except KeyError:
            return
        done = subprocess.run(
            ["userdel", user.name], env={"PATH": SAFE_PATH}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            time.sleep(0.2)
    raise ClusterError(f"cannot remove user {user.name} ({done.stderr.strip()}): run `down` again")


def remove_cgroups(c: Cluster) -> None:
    """Removes the cgroups that Slurm leaves, named after the node; only empty ones can be removed.
    """
    top = Path("/sys/fs/cgroup")
    for node in c.nodes:
        for root in [*top.glob(f"*/slurm_{node}"), *top.glob(f"system.slice/{node}_slurm*")]:
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def unmount(c: Cluster) -> None:
    below = c.prefix + "/"
    rows = Path("/proc/self/mounts").read_text().splitlines()
    for where in reversed([r.split()[1] for r in rows]):
        if where.startswith(below):
            subprocess.run(["umount", "-l", where], env={"PATH": SAFE_PATH}, check=False)
    if any(os.path.ismount(p) for p in c.root.iterdir()):
        raise ClusterError(f"a mount below {c.prefix} stays: unmount it and run `down` again")
