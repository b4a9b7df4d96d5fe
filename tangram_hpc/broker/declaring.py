"""The part of the broker that is told what there is: services, endpoints, rollout pools, and what
trajectories did where the broker cannot see it. It keeps what pools have learned in their folders.

Law: each declaration is answered once. Trees are beliefs: they are read when a pool is declared,
written now and then and at the end, and no failure to write one ends anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..domain import event as ev
from ..domain.rollouts import RolloutsSpec
from ..errors import InvalidInput
from ..ports import Timer, TreeStore
from ..protocol import message as ms
from ..scheduler.handlers.quota_facts import declaration
from ..scheduler.handlers.rollout_facts import declaration_of_rollouts
from ..scheduler.handlers.service_facts import declaration_of_service
from ..scheduler.routing.cmlfq import CausalTree
from ..scheduler.routing.rollout_pools import RolloutPool, shape_of
from ..scheduler.scheduler import Scheduler

_SAVE_S = 10.0  # between two looks whether there is something new to save: what a kill costs

Declaration = ms.DeclareService | ms.DeclareEndpoint | ms.DeclareRollouts
Word = ms.ToolReturned | ms.EndTrajectory


class Declaring:
    """See `Broker`."""

    scheduler: Scheduler
    ended: bool
    _timer: Timer
    _trees: TreeStore | None
    _saved: dict[str, int]  # of pools whose tree was read: trajectories learned when last saved
    _now: Callable[[], int]
    _happen: Callable[..., None]
    _say: Callable[..., None]

    def _declare(self, client: int, message: Declaration) -> None:
        ledger, now = self.scheduler.ledger, self._now()
        match message:
            case ms.DeclareService(spec=service):
                facts, why = declaration_of_service(
                    ledger, self.scheduler.placer, service, now)
            case ms.DeclareEndpoint(spec=endpoint):
                facts, why = declaration(ledger, endpoint, now)
            case ms.DeclareRollouts(spec=pool):
                why = self._declare_pool(pool)
                facts = []
        for fact in facts:
            self._happen(fact)
        if why:
            self._say(client, ms.Rejected(message.request, why))
        else:
            self._say(client, ms.Answer(message.request), b"{}")

    def _of_trajectory(self, client: int, word: Word) -> None:
        if word.pool not in self.scheduler.ledger.rollouts:
            return
        if isinstance(word, ms.ToolReturned):
            self._happen(ev.ToolReturned(self._now(), client, word.pool, word.trajectory,
                                         word.tool, word.characters, word.status))
        else:
            self._happen(ev.TrajectoryEnded(self._now(), client, word.pool, word.trajectory,
                                            word.tokens, word.epoch))

    # ---- pools and their trees -----------------------------------------------------------------

    def _declare_pool(self, told: RolloutsSpec, changed: bool = False) -> str:
        """Declares a pool that goes on from what its folder holds; why it is refused, or nothing.
        `changed`: it may be another one than an earlier start's."""
        facts, why = declaration_of_rollouts(self.scheduler.ledger, told, self._now(), changed)
        if why:
            return why
        learned = None
        if told.tree and self._trees is not None and told.name not in self._saved:
            pools = self.scheduler.ledger.rollouts
            for other in self._saved:
                if pools[other].spec.tree == told.tree:  # they would replace each other's file
                    return (f"rollouts {told.name}: tree: pool {other!r} keeps its own in "
                            f"{told.tree}; name another folder")
            try:
                learned = self._learned(told)
            except InvalidInput as error:
                return f"rollouts {told.name}: tree: {error}"
        for fact in facts:
            self._happen(fact)
        if learned is not None:
            pool = self.scheduler.ledger.rollouts[told.name]
            pool.believe(*learned)
            self._saved[told.name] = pool.counts.ended
        return ""

    def _learned(self, spec: RolloutsSpec) -> tuple[CausalTree, CausalTree]:
        """What all have learned that share a pool's folder, and what this job has.

        Raises:
            InvalidInput: it cannot be read, or was learned with other settings.
        """
        assert self._trees is not None
        found = [tree or CausalTree(shape_of(spec)) for tree in self._trees.load(spec.tree)]
        if any(tree.shape != shape_of(spec) for tree in found):
            raise InvalidInput(f"{spec.tree} was learned with other settings (payload_edges, depth,"
                               " least, enough, epochs, nodes_max, since); name another folder")
        return found[0], found[1]

    def _declare_pools(self, specs: tuple[RolloutsSpec, ...]) -> None:
        """Those of the config file.

        Raises:
            InvalidInput: one is wrong.
        """
        for spec in specs:
            if why := self._declare_pool(spec, changed=True):
                raise InvalidInput(why)
        if self._trees is not None:
            self._timer.after(_SAVE_S, self._save_trees)

    def _save_trees(self) -> None:
        """Saves what is new; the next look is so late that this takes 1 % of the time at most."""
        if not self.ended:
            began = self._now()
            self._save_now()
            took_s = (self._now() - began) / 1e9
            self._timer.after(max(_SAVE_S, 100 * took_s), self._save_trees)

    def _save_now(self) -> None:
        for name, saved in self._saved.items():
            pool: RolloutPool = self.scheduler.ledger.rollouts[name]
            if self._trees is not None and pool.counts.ended != saved:
                self._trees.save(pool.spec.tree, pool.lesson)
                self._saved[name] = pool.counts.ended

    def _of_pools(self) -> dict[str, Any]:
        """What is told of pools beside their state: why what they learned could not be saved."""
        pools = self.scheduler.ledger.rollouts.values()
        found = {p.spec.name: self._trees.trouble(p.spec.tree) for p in pools} if (
            self._trees is not None) else {}
        return {"rollouts_unsaved": {name: why for name, why in found.items() if why}}

    def _close_trees(self) -> None:
        """The broker ends."""
        self._save_now()
        if self._trees is not None:
            self._trees.close()
