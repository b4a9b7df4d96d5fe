"""Handles declarations of services, endpoints and rollout pools, and reports about trajectories.

A client (or the config file) declares services, endpoints and pools, which actions may use. Clients
also report events of trajectories that the broker does not see: a tool returned, or a trajectory
ended. A rollout pool whose declaration names a folder goes on from the causal trees in it and saves
what it learns there.

Each declaration is answered once. Trees are read when a pool is declared, and written from time to
time and at the end. They only hold estimates, so a failure to write one ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..domain.rollouts import RolloutsSpec
from ..errors import InvalidInput
from ..ports import Timer, TreeStore
from ..protocol import message as ms
from ..scheduler.handlers.rollout_prior import prior_of
from ..scheduler.policy.declarations import (
    declaration_of_endpoint,
    declaration_of_rollouts,
    declaration_of_service,
)
from ..scheduler.routing.cmlfq import CausalTree
from ..scheduler.routing.rollout_pools import shape_of
from ..scheduler.scheduler import Scheduler
from .broker_settings import Settings
from .tenancy import tenants_declared

_SAVE_S = 10.0  # least time between two saves of trees; a killed broker forgets no more than that

Declaration = ms.DeclareService | ms.DeclareEndpoint | ms.DeclareRollouts
TrajectoryReport = ms.ReportToolReturn | ms.EndTrajectory


class Registration:
    """The broker's declarations and the trees of its pools.

    Args:
        scheduler: its ledger and placer tell whether a declaration is valid.
        trees: where pools keep what they learned; None if nothing is kept.
        timer: calls back on the broker's loop.
        now: the broker's time in epoch ns.
        record_event: journals an event and applies it.
        send_to_client: queues a message to a client.
    """

    def __init__(self, scheduler: Scheduler, trees: TreeStore | None, timer: Timer,
                 now: Callable[[], int], record_event: Callable[[ev.Event], None],
                 send_to_client: Callable[..., None]) -> None:
        self._scheduler, self._trees, self._timer, self._now = scheduler, trees, timer, now
        self._record_event, self._send_to_client = record_event, send_to_client
        self._read: set[str] = set()  # pools whose trees were read since this broker started
        # For each pool with trees: how many of its trajectories had ended when it was declared or
        # saved last. A pool of an earlier start of the broker has no entry before its first save.
        self._saved: dict[str, int] = {}
        self._stopped = False

    def start(self, settings: Settings) -> None:
        """Declares the tenants, services, endpoints and pools of the config file, and begins to
        save trees.

        Raises:
            InvalidInput: a pool is wrong.
        """
        now = self._now()
        for event in (*tenants_declared(self._scheduler.ledger, settings.tenants, now),
                      *(ev.ServiceDeclared(now, service) for service in settings.services),
                      *(ev.EndpointDeclared(now, endpoint) for endpoint in settings.endpoints)):
            self._record_event(event)
        for pool in settings.rollouts:
            if why := self._declare_pool(pool, changed=True):
                raise InvalidInput(why)
        if self._trees is not None:
            self._timer.after(_SAVE_S, self._save_and_rearm)

    def stop(self) -> None:
        """Saves nothing from now on, because another broker has taken this one's place."""
        self._stopped = True

    def close(self) -> None:
        """Saves the trees for the last time; returns when they are written or took too long."""
        self._stopped = True
        self._save()
        if self._trees is not None:
            self._trees.close()

    def declare(self, client: int, message: Declaration) -> None:
        """Records a client's declaration and answers it."""
        ledger, now = self._scheduler.ledger, self._now()
        match message:
            case ms.DeclareService(spec=service):
                events, why = declaration_of_service(
                    ledger, self._scheduler.state.placer, service, now)
            case ms.DeclareEndpoint(spec=endpoint):
                events, why = declaration_of_endpoint(ledger, endpoint, now)
            case ms.DeclareRollouts(spec=pool):
                events, why = [], self._declare_pool(pool)
        for event in events:
            self._record_event(event)
        if why:
            self._send_to_client(client, ms.Rejected(message.request, why))
        else:
            self._send_to_client(client, ms.QueryReply(message.request), b"{}")

    def report(self, client: int, report: TrajectoryReport) -> None:
        """Records a client's report about a trajectory; a report to an unknown pool is ignored."""
        if report.pool not in self._scheduler.ledger.rollouts:
            return
        if isinstance(report, ms.ReportToolReturn):
            self._record_event(ev.ToolReturned(self._now(), client, report.pool, report.trajectory,
                                               report.tool, report.characters, report.status))
        else:
            self._record_event(ev.TrajectoryEnded(self._now(), client, report.pool,
                                                  report.trajectory, report.tokens, report.epoch))

    def unsaved(self) -> dict[str, str]:
        """Returns, by the pool's name, why its trees could not be saved."""
        if self._trees is None:
            return {}
        pools = self._scheduler.ledger.rollouts.values()
        found = {pool.spec.name: self._trees.trouble(pool.spec.tree) for pool in pools}
        return {name: why for name, why in found.items() if why}

    # ---- pools and their trees -----------------------------------------------------------------

    def _declare_pool(self, told: RolloutsSpec, changed: bool = False) -> str:
        """Declares a pool, with the trees in its folder as its first estimates.

        Args:
            changed: the pool may differ from the one that an earlier start declared.

        Returns:
            Why the declaration is refused; empty if it is not.
        """
        events, why = declaration_of_rollouts(self._scheduler.ledger, told, self._now(), changed)
        if why:
            return why
        prior = None
        if told.tree and self._trees is not None and told.name not in self._read:
            pools = self._scheduler.ledger.rollouts
            for other in self._read:
                if pools[other].spec.tree == told.tree:  # they would replace each other's file
                    return (f"rollouts {told.name}: tree: pool {other!r} keeps its own in "
                            f"{told.tree}; name another folder")
            try:
                prior = prior_of(told.name, *self._learned(told, self._trees), self._now())
            except InvalidInput as error:
                return f"rollouts {told.name}: tree: {error}"
        for event in events:
            self._record_event(event)
        if prior is not None:
            self._record_event(prior)
            self._read.add(told.name)
            self._saved[told.name] = self._scheduler.ledger.rollouts[told.name].counts.ended
        return ""

    def _learned(self, spec: RolloutsSpec, trees: TreeStore) -> tuple[CausalTree, CausalTree]:
        """Reads the trees in a pool's folder: the one of all jobs that share it, and this job's
        own.

        Raises:
            InvalidInput: a tree cannot be read, or was learned with other settings.
        """
        found = [tree or CausalTree(shape_of(spec)) for tree in trees.load(spec.tree)]
        if any(tree.shape != shape_of(spec) for tree in found):
            raise InvalidInput(f"{spec.tree} was learned with other settings (payload_edges, depth,"
                               " least, enough, epochs, nodes_max, since); name another folder")
        return found[0], found[1]

    def _save_and_rearm(self) -> None:
        """Saves, and plans the next save so that saving takes at most 1 % of the time."""
        if not self._stopped:
            began = self._now()
            self._save()
            took_s = (self._now() - began) / 1e9
            self._timer.after(max(_SAVE_S, 100 * took_s), self._save_and_rearm)

    def _save(self) -> None:
        """Saves the trees of the pools in which a trajectory has ended since the last save, also of
        those that an earlier start of the broker declared: its clients do not declare them again.
        """
        if self._trees is None:
            return
        pools = self._scheduler.ledger.rollouts
        taken = {pools[name].spec.tree for name in self._read}
        for name, pool in pools.items():
            tree, ended = pool.spec.tree, pool.counts.ended
            if not tree or ended == self._saved.get(name):
                continue
            if name in self._read or tree not in taken:  # no two pools write one file
                self._trees.save(tree, pool.lesson)
                self._saved[name] = ended
