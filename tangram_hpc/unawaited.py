"""Makes the failure of a task that nobody awaits known, so that it is not lost in silence."""

from __future__ import annotations

import asyncio


def raise_failure(task: asyncio.Task[None]) -> None:
    """Raises what the task has raised, as a done-callback of it: the loop's handler then reports
    it. The end of a cancelled task is no failure.
    """
    if not task.cancelled():
        task.result()
