"""Drives a workload's trajectories through the public client, each in its own task.

It does what the simulated client does (`simulator/workload_client.py`), in real time. A session is
requested with a trajectory's first CPU action and closed with its last one. Where sessions reserve
CPUs it is requested at the trajectory's start, the first turn begins when it is open, and the time
that the session's admission took is subtracted from the submission times of the first turn's
actions. Times of the workload are multiplied by `scale`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ...client.client import Client
from ...client.future import Future
from ...client.session import Session
from ...domain.action import Profile
from ...errors import ActionFailed
from ..workload import WorkAction, WorkloadTrajectory, to_ns
from .countdown import command


@dataclass(slots=True)
class Sent:
    """A submitted action: its entry in the workload, the time (ns since the epoch), and its future.
    """

    trajectory: int
    turn: int
    index: int
    work: WorkAction
    submit_ns: int
    future: Future


class Driver:
    """All trajectories of one run. `sent` is filled while they run."""

    def __init__(self, client: Client, scale: float, reserved: bool) -> None:
        self._client, self._scale, self._reserved = client, scale, reserved
        self.sent: list[Sent] = []
        self.begun_ns = 0

    async def run(self, trajectories: tuple[WorkloadTrajectory, ...]) -> None:
        """Runs all trajectories to their ends.

        Raises:
            ActionFailed: An action did not complete; actions that were still to come are not
                submitted.
        """
        self._zero = time.monotonic()
        self.begun_ns = time.time_ns()
        tasks = [asyncio.ensure_future(self._play(i, t)) for i, t in enumerate(trajectories)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _until(self, at: float) -> None:
        """Sleeps until a time since the start of the run, in wall seconds."""
        await asyncio.sleep(self._zero + at - time.monotonic())

    async def _play(self, number: int, one: WorkloadTrajectory) -> None:
        left = sum(len(turn.actions) for turn in one.turns)
        session: Session | None = None
        clock, late_ns = one.start_s * self._scale, 0
        try:
            if self._reserved and left:
                await self._until(clock)
                session = self._session(one)
                await session.opened
                late_ns, clock = to_ns(session.wait_s), time.monotonic() - self._zero
            for j, turn in enumerate(one.turns):
                await self._until(clock + turn.think_s * self._scale)
                if turn.actions:
                    session = session or self._session(one)
                    await self._act(number, j, turn.actions, session, late_ns)
                    left, late_ns = left - len(turn.actions), 0
                    if not left and not self._reserved:
                        session.close()
                clock = time.monotonic() - self._zero
        finally:
            if session is not None:
                session.close()

    def _session(self, one: WorkloadTrajectory) -> Session:
        return self._client.session(mem=one.session.mem_mib, name=one.trajectory, trusted=True)

    async def _act(self, number: int, turn: int, actions: tuple[WorkAction, ...],
                   session: Session, late_ns: int) -> None:
        """Submits a turn's actions and waits for all of them."""
        mine = []
        for k, work in enumerate(actions):
            wall_s = work.work_s * self._scale
            now = time.time_ns()
            future = session.exec(
                command(wall_s, work.serial, work.resize), cpus=list(work.degrees), name=work.name,
                resizable=work.resize, profile=Profile(to_ns(wall_s), round(work.serial * 10**6)))
            mine.append(Sent(number, turn, k, work, now - late_ns, future))
        self.sent += mine
        for each in mine:
            result = await each.future
            if not result.ok:
                raise ActionFailed(f"replay: action {each.future.id} ({each.work.name}) ended as "
                                   f"{result.state.value}: {result.reason} "
                                   f"{result.stderr.decode(errors='replace')[-200:]}", result)
