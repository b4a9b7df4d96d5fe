"""Carries out the steps of a simple Dockerfile in a session that was opened with its base image.

Each trial carries the steps out again. This needs no builder, no daemon and no cache, but costs the
time of the steps each time. Where many trials share a Dockerfile with long steps, build an image
once instead (docs/IMAGES.md). Paths of COPY and ADD cannot leave the build context, neither by
their names nor by links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import tangram_hpc
from tangram_hpc.errors import ActionFailed, FileMissing, InvalidInput

from .dockerfile_steps import BuildCommand, BuildCopy, BuildFolder, Recipe, recipe

_OWN_FOLDER = "/session"  # where commands begin if the image names no directory
_NAMES_MAX = 500  # names of one `chown`
_TAIL = 2000  # how many characters of a failed command's output its error quotes


async def replay_dockerfile(session: tangram_hpc.Session, dockerfile: Path, *,
                            cpus: int | tuple[int, int] = 1, timeout: float | None = None
                            ) -> Recipe:
    """Carries out the steps of a Dockerfile in a session.

    Args:
        session: an open session whose image is that of FROM.
        dockerfile: the path of the Dockerfile; its folder is the build context.
        cpus: the cores of each command, as for `Client.submit`.
        timeout: the longest run time of a command, in seconds; None for no limit.

    Returns:
        The recipe, with the variables, the working directory and the user after the last step.

    Raises:
        InvalidInput: a step cannot be done in a session, or a source is missing or is no file or
            folder of the build context.
        ActionFailed: a command failed; the message ends with its output.
    """
    known = await session.exec(["/usr/bin/env"])
    base = dict(line.split("=", 1) for line in known.text.splitlines() if "=" in line)
    done = recipe(dockerfile.read_text(), base, await _working_directory(session))
    if (dockerfile.parent / ".dockerignore").exists() and any(
            isinstance(step, BuildCopy) for step in done.steps):
        raise InvalidInput(f"{dockerfile.parent / '.dockerignore'}: it is not applied when a "
                           "Dockerfile is done in a session; build the image elsewhere")
    for step in done.steps:
        if isinstance(step, BuildFolder):
            await session.mkdir(step.path)
        elif isinstance(step, BuildCopy):
            await _copy(session, step, dockerfile.parent)
        else:
            await _run(session, step, cpus, timeout)
    return done


async def _working_directory(session: tangram_hpc.Session) -> str:
    """Returns the working directory of the session's image, which is "/" if the image names none,
    as for Docker."""
    told = await session.exec(["/bin/sh", "-c", "pwd -P"])
    place = told.text.strip()
    return place if told and place.startswith("/") and place != _OWN_FOLDER else "/"


async def _run(session: tangram_hpc.Session, step: BuildCommand, cpus: int | tuple[int, int],
               timeout: float | None) -> None:
    options = {"user": step.user} if step.user else {}
    result = await session.exec(step.argv, cwd=step.cwd, env=step.env, cpus=cpus, timeout=timeout,
                                keep="tail", name="dockerfile", **options)
    if not result:
        said = (result.stdout + result.stderr).decode(errors="replace")[-_TAIL:].strip()
        raise ActionFailed(f"Dockerfile line {step.line}: the command ended with {result.exit_code}"
                           f" ({result.state.value}) {result.reason}: {said}", result)


async def _copy(session: tangram_hpc.Session, step: BuildCopy, context: Path) -> None:
    """Copies the sources of one step. Nothing outside of the build context is read: a task may come
    from anybody, and a link in it may name any file of this machine."""
    for pattern in step.sources:
        below = pattern.lstrip("/").removeprefix("./").strip("/")
        try:
            found = sorted(context.glob(below)) if below not in ("", ".") else [context]
        except (NotImplementedError, ValueError) as error:
            raise InvalidInput(f"Dockerfile line {step.line}: {pattern!r} is no pattern of a path: "
                               f"{error}") from None
        if not found:
            raise InvalidInput(f"Dockerfile line {step.line}: nothing in {context} is {pattern!r}")
        for source in found:
            for each in (source, *(source.rglob("*") if source.is_dir() else ())):
                _must_be_inside(each, context, step.line)
                if each is not source and each.is_symlink() and each.is_dir():
                    raise InvalidInput(f"Dockerfile line {step.line}: {each} is a link to a folder;"
                                       " name that folder itself, or remove the link")
            await _copy_one(session, step, source)


def _must_be_inside(path: Path, context: Path, line: int) -> None:
    """Raises InvalidInput if a path of the build context leads out of it, or to anything but a file
    or a folder."""
    try:
        real = path.resolve(strict=True)
        inside = real.is_relative_to(context.resolve()) and (real.is_file() or real.is_dir())
    except (OSError, RuntimeError):  # it leads to nothing, or round in a circle
        inside = False
    if not inside:
        raise InvalidInput(f"Dockerfile line {line}: {path} is no file or folder of the build "
                           "context; remove it, or copy what a link leads to into the context")


async def _copy_one(session: tangram_hpc.Session, step: BuildCopy, source: Path) -> None:
    target = step.target
    if source.is_dir():
        made = [] if await _is_folder(session, target) else [target.rstrip("/")]
        inner = [(path, f"{target.rstrip('/')}/{path.relative_to(source).as_posix()}")
                 for path in sorted(source.rglob("*"))]
        names = [*made, *(name for _, name in inner)]
    else:
        if not target.endswith("/") and await _is_folder(session, target):
            target += "/"
        inner = [(source, target + source.name if target.endswith("/") else target)]
        names = [inner[0][1]]
    if step.mode is None:
        await asyncio.to_thread(session.upload, source, target)
    else:
        for path, name in inner:
            if path.is_dir():
                await session.mkdir(name)
            else:
                await session.write(name, path.read_bytes(), step.mode)
    if step.owner:  # where user 0 is the only user, this succeeds without effect
        await _give(session, step, names)


async def _give(session: tangram_hpc.Session, step: BuildCopy, names: Sequence[str]) -> None:
    """Gives copied files to the owner that --chown names."""
    for first in range(0, len(names), _NAMES_MAX):
        done = await session.exec(
            ["chown", "-h", step.owner, "--", *names[first:first + _NAMES_MAX]], user="root",
            keep="tail", name="dockerfile")
        if not done:
            raise ActionFailed(f"Dockerfile line {step.line}: --chown={step.owner}: "
                               f"{done.stderr.decode(errors='replace')[-_TAIL:].strip()}", done)


async def _is_folder(session: tangram_hpc.Session, path: str) -> bool:
    try:
        return bool((await session.stat(path)).kind == "dir")
    except FileMissing:
        return False
