"""Actions with GPUs start when the services have freed these GPUs, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

from helpers.service_rig import Rig, play

from tangram_hpc.app.node_executor import NodeExecutor
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import StartAttempt

LEASE = 100


class Sandboxes:
    """Notes its orders."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.got.append((name, *args))

    def names(self) -> list[str]:
        return [one[0] for one in self.got]


def node(rig: Rig) -> tuple[NodeExecutor, Sandboxes]:
    sandboxes = Sandboxes()
    return NodeExecutor(sandboxes, rig.executor, rig), sandboxes  # type: ignore[arg-type]


def order(gpus: tuple[int, ...], session: int = 0) -> StartAttempt:
    return StartAttempt(LEASE, Action(LEASE, "train", session=session), (), gpus)


async def resident(rig: Rig) -> None:
    rig.declare("a")
    await rig.all(rig.call("a"))
    rig.move_s = 0.05


async def until_free(rig: Rig) -> None:
    while rig.executor.occupies((0,)):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.005)


def test_an_action_starts_behind_the_parking_with_what_was_said_meanwhile() -> None:
    async def scene(rig: Rig) -> None:
        executor, sandboxes = node(rig)
        await resident(rig)
        for _ in range(2):
            executor.start(order((0,)), memoryview(b"x"))  # a repeated order changes nothing
        executor.give_input(LEASE, 0, b"in", 1, 0)
        executor.resize(LEASE, (1, 2))
        executor.start(StartAttempt(7, Action(7, "other"), (), (1,)), memoryview(b"y"))
        assert sandboxes.names() == ["start"]  # GPU 1 is free
        await until_free(rig)
        assert sandboxes.names() == ["start", "start", "give_input", "resize"]
        assert sandboxes.got[1][1] == order((0,)) and bytes(sandboxes.got[1][2]) == b"x"
        await rig.all(rig.call("a"))
        assert [e[2] for e in rig.log] == ["load", "wake", "call", "park", "wake", "call"]
    play(scene)


def test_an_action_that_is_given_up_never_starts_and_its_copy_is_parked_all_the_same() -> None:
    async def scene(rig: Rig) -> None:
        executor, sandboxes = node(rig)
        await resident(rig)
        executor.start(order((0,)), memoryview(b"x"))
        await asyncio.sleep(0.01)
        executor.kill(LEASE, ActionState.TIMEOUT, "too long")
        assert rig.ends[LEASE] == Outcome(ActionState.TIMEOUT, reason="too long")
        await until_free(rig)
        assert sandboxes.names() == [] and rig.copies[0].state == "parked"
        await rig.all(rig.call("a"))  # the copy is as good as before
        assert len(rig.of("load")) == 1
    play(scene)


def test_a_lease_that_is_taken_back_or_whose_session_closes_never_starts() -> None:
    async def scene(rig: Rig) -> None:
        executor, sandboxes = node(rig)
        await resident(rig)
        executor.start(order((0,)), memoryview(b"x"))
        assert executor.take_back(LEASE)
        await until_free(rig)
        rig.move_s = 0.0
        await rig.all(rig.call("a"))
        rig.move_s = 0.05
        executor.start(order((0,), session=5), memoryview(b"x"))
        executor.close_session(6)
        assert LEASE not in rig.ends
        executor.close_session(5)
        assert rig.ends[LEASE].state is ActionState.CANCELLED
        await until_free(rig)
        assert sandboxes.names() == ["close_session", "close_session"]
    play(scene)


def test_closing_the_node_ends_actions_whose_start_is_delayed() -> None:
    async def scene(rig: Rig) -> None:
        executor, sandboxes = node(rig)
        await resident(rig)
        rig.move_s = 0.02
        executor.start(order((0,)), memoryview(b"x"))
        executor.close()
        await executor.closed()
        assert rig.ends[LEASE].state is ActionState.CANCELLED and sandboxes.names() == ["close"]
    play(scene)
