"""The laws of a job, each as one function with the sentence that it checks.

Some are checked while the run goes on, where the evidence is: when an attempt begins, when a broker
has replayed its journals. The others are checked at the end, from what the users have seen, what
the executors have done, and the events of the journals. `LAWS_AT_THE_END` lists these. A law that
does not hold raises `LawBroken` with its name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from helpers.ledger_facts import difference, facts

from swarm.client import Submission
from swarm.worker import MEM_MIB, Execution, PlayedExecutor
from tangram_hpc.accounting.record import Fold
from tangram_hpc.client.future import ExecResult
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.ids import client_of, show
from tangram_hpc.domain.service import service_of
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState, NodeState
from tangram_hpc.errors import BrokerUnreachable, InfeasibleRequest
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage.journal_segments import JobJournal

if TYPE_CHECKING:
    from swarm.job import Job

_RESULT_LOST = "its result was lost with its node"


class LawBroken(AssertionError):
    """A law does not hold. `law` is its name."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law = law


def replay(events: Sequence[ev.Event], margin_ns: int) -> Scheduler:
    """A scheduler that has handled these events."""
    scheduler = Scheduler(make_placer("elastic"), margin_ns)
    for event in events:
        scheduler.handle(event)
    return scheduler


class Laws:
    """The evidence of one run, and the laws that are checked while it goes on.

    Attributes:
        executions: what began on any node, by action.
        submissions: what users submitted, by action.
        blamed: the uids of workers whose loss has a cause.
        forgotten: names whose results somebody has forgotten.
    """

    def __init__(self, job: Job, margin_ns: int) -> None:
        self.job, self._margin_ns = job, margin_ns
        self.executions: dict[int, list[Execution]] = defaultdict(list)
        self.submissions: dict[int, Submission] = {}
        self.blamed: set[str] = set()
        self.forgotten: set[str] = set()

    # ---- while the run goes on ----

    def submitted(self, one: Submission) -> None:
        """A user has submitted something."""
        if one.id in self.submissions:
            raise LawBroken("an id is given once", show(one.id))
        self.submissions[one.id] = one

    def began(self, executor: PlayedExecutor, one: Execution) -> None:
        """An attempt began: checks what an executor can see, and how often the action has run."""
        action = one.order.action
        self._fits(executor, one)
        mine = self.submissions.get(action.id)
        if mine is None:
            raise LawBroken("nothing runs that nobody submitted", show(action.id))
        if mine.token != one.token:
            raise LawBroken("a call reaches its worker as it was made",
                            f"{show(action.id)}: {one.token!r} is not {mine.token!r}")
        earlier = self._counted(self.executions[action.id])
        self._runs_again_only_after_a_loss(earlier, one)
        if action.session and earlier:
            raise LawBroken("in a session an action runs at most once", show(action.id))
        if not action.once and len(earlier) >= action.attempts_max:
            raise LawBroken("a plain action runs at most 1 + retries times",
                            f"{show(action.id)}: {len(earlier) + 1} of {action.attempts_max}")
        self.executions[action.id].append(one)

    def _counted(self, executions: list[Execution]) -> list[Execution]:
        """The executions but those of orders that the journal lost with the broker's machine: with
        `batch`, orders leave before the journal is synced. Their actions run once more, and their
        nodes end them when the next broker asks for it, while it lends their units again.
        """
        if not executions or self.job.plan.sync != "batch" or not self.job.struck["power"]:
            return executions
        known = {event.lease for event in JobJournal(self.job.folder).events()
                 if isinstance(event, ev.LeaseGranted)}
        return [each for each in executions if each.order.lease in known]

    def _fits(self, executor: PlayedExecutor, one: Execution) -> None:
        """Leases never hold more than a node has, and each has its units for itself."""
        spec, order = executor.worker.spec, one.order
        others = [each.order for each in self._held(executor)]
        self._cores_fit(executor, one)
        gpus = {gpu for other in others for gpu in other.gpus
                if not (service_of(other.action.key)
                        and other.action.key == order.action.key)}
        if set(order.gpus) & gpus or not set(order.gpus) <= set(spec.gpus):
            raise LawBroken("leases stay within capacity", f"{order} beside {others}")
        mem = sum(other.action.mem_mib for other in (*others, order))
        if mem > MEM_MIB:
            raise LawBroken("leases stay within capacity", f"{mem} MiB")
        session = order.action.session
        if session and executor.sandboxes.get(session) != "up":
            raise LawBroken("an action in a session finds its sandbox", f"{order}")
        if service_of(order.action.key) not in ("", *executor.services):
            raise LawBroken("a service is prepared before it is called", f"{order}")
        if session and not self._parallel(session) and any(
                each.order.action.session == session for each in executor.running.values()):
            raise LawBroken("one action at a time in a session", f"{order}")

    def _held(self, executor: PlayedExecutor) -> list[Execution]:
        return self._counted([*executor.running.values(), *executor.cleaning.values()])

    def _cores_fit(self, executor: PlayedExecutor, one: Execution) -> None:
        # a lease that ended while an order to shrink was on its way holds more than it was left
        others = {core for each in self._held(executor)
                  if each is not one and (each.ended is None or len(each.cores) == 1)
                  for core in each.cores}
        if set(one.cores) & others or not set(one.cores) <= set(executor.worker.spec.cores):
            raise LawBroken("leases stay within capacity", f"{one.order} beside {others}")

    def _parallel(self, session: int) -> bool:
        return self.job.sessions_opened[session].parallel

    def resized(self, executor: PlayedExecutor, one: Execution, cores: tuple[int, ...]) -> None:
        """A running lease has other cores now, which are its own as well."""
        one.cores = cores
        self._cores_fit(executor, one)

    def _runs_again_only_after_a_loss(self, earlier: Sequence[Execution], one: Execution) -> None:
        """An action runs again only if the node of its last attempt was given up."""
        if not earlier:
            return
        mine = self.job.ledger().nodes.get(one.node)
        if mine is not None and mine.state is NodeState.DOWN:
            return  # a worker that was given up and has not heard of it yet
        last = earlier[-1]
        if last.node == one.node and last.worker is one.worker:
            raise LawBroken("an action runs again only after its node was lost",
                            f"{show(one.order.action.id)} on node {one.node} twice")
        node = self.job.ledger().nodes.get(last.node)
        if node is not None and node.state is not NodeState.DOWN:
            raise LawBroken("an action runs again only after its node was lost",
                            f"{show(one.order.action.id)}: node {last.node} is {node.state}")

    def sandbox_opened(self, executor: PlayedExecutor, spec: SessionSpec) -> None:
        """A sandbox is built at most on one node that is not given up."""
        for worker in self.job.living_workers():
            other = worker.executor
            if other is None or other is executor or spec.id not in other.sandboxes:
                continue
            node = self.job.ledger().nodes.get(other.node)
            if (node is not None and node.state is not NodeState.DOWN and not worker.driver.over
                    and self._is_known(spec.id, other.node)):
                raise LawBroken("a session has one sandbox", f"{show(spec.id)} on "
                                f"{other.node} and {executor.node}")

    def _is_known(self, session: int, node: int) -> bool:
        """Returns whether the journal has the order for this sandbox; see `_counted`. Its node ends
        a sandbox that the next broker does not know.
        """
        return (self.job.plan.sync != "batch" or not self.job.struck["power"]
                or any(event.session == session and event.node == node
                       for event in JobJournal(self.job.folder).events()
                       if isinstance(event, ev.SessionPlaced)))

    def called(self, one: Submission) -> None:
        """A grant of an endpoint is used at most once, and no more at once than it has slots. A
        broker that did not wait for the clients of the one before cannot know their calls.
        """
        if one.calls > 1:
            raise LawBroken("a grant is used at most once", show(one.id))
        calling = [each for each in self.submissions.values()
                   if each.calling and each.client.alive and not each.future.done()
                   and not each.cancelled
                   and not (self.job.restarted_for_good and each.client.may_lose)]
        if len(calling) > 2:
            raise LawBroken("an endpoint has no more calls than slots", str(len(calling)))

    def replayed(self, scheduler: Scheduler, from_checkpoint: bool) -> None:
        """A replay gives the same ledger each time, with and without a checkpoint."""
        scheduler.ledger.check()
        if from_checkpoint:
            whole = replay(list(JobJournal(self.job.folder).events()), self._margin_ns)
            self._same("a checkpoint gives the ledger of its journal", scheduler, whole)

    def _same(self, law: str, one: Scheduler, other: Scheduler) -> None:
        left, right = facts(one.ledger), facts(other.ledger)
        if left != right:
            raise LawBroken(law, difference(left, right))

    # ---- at the end ----

    def check(self, events: list[ev.Event]) -> None:
        """Checks all laws that are left."""
        for law in LAWS_AT_THE_END:
            law(self, events)


def every_submission_is_answered_once(laws: Laws, events: list[ev.Event]) -> None:
    """Each submission of a client that lives has ended, and no future hangs."""
    for one in laws.submissions.values():
        if one.client.alive and not one.future.done():
            raise LawBroken("no future hangs", f"{show(one.id)} {one.kind.value} of "
                            f"{one.client.name}: {laws.job.story(one.id)}")


def an_answer_is_what_the_work_gave(laws: Laws, events: list[ev.Event]) -> None:
    """A value comes from an attempt of that very action which ended with it, and was not given up.
    """
    made = {each.value: each.order.action for runs in laws.executions.values() for each in runs
            if each.value}
    for one in laws.submissions.values():
        value = one.value()
        if not value or one.kind is Kind.GRANT:
            continue
        action = made.get(value)
        if action is None or not (action.id == one.id or (one.once and action.once == one.once)):
            raise LawBroken("an answer is what the work gave", f"{show(one.id)}: {value!r}")


def a_client_gets_an_error_only_for_a_cause(laws: Laws, events: list[ev.Event]) -> None:
    """A future fails only since a node was lost, its session ended, its user cancelled it, or its
    broker could not be had for longer than the grace."""
    for one in laws.submissions.values():
        if one.unseen:
            continue
        if not one.future.done() or one.future.cancelled():
            if one.future.cancelled() and not one.cancelled:
                raise LawBroken("only a user cancels", show(one.id))
            continue
        error, state = one.future.exception(), one.state()
        if error is None or one.cancelled or one.kind is Kind.GRANT:
            if error is None and isinstance(value := one.future.result(), ExecResult):
                assert value.state in (ActionState.COMPLETED, ActionState.FAILED), value
            continue
        if isinstance(error, BrokerUnreachable):
            if not laws.job.may_lose(one.client):
                raise LawBroken("a broker that is back within the grace loses no client",
                                f"{one.client.name}: {error}")
        elif isinstance(error, InfeasibleRequest) or (
                state in (ActionState.COMPLETED, ActionState.FAILED) and not one.session):
            raise LawBroken("an action fails only for a cause", f"{show(one.id)}: {error}")


def a_result_is_lost_only_with_its_node(laws: Laws, events: list[ev.Event]) -> None:
    """If a client is told that a result was lost with its node, the node was lost. The disk of a
    broker that failed may have lost the event that says so."""
    if laws.job.struck["power"]:
        return
    lost = {event.node for event in events if isinstance(event, ev.NodeLost)}
    ran_on = dict[int, int]()
    for event in events:
        if isinstance(event, ev.LeaseGranted):
            ran_on[event.action] = event.node
    for one in laws.submissions.values():
        told = one.future.told
        if told is not None and _RESULT_LOST in told[0].outcome.reason and (
                ran_on.get(told[0].action) not in lost):
            raise LawBroken("a result is lost only with its node", show(one.id))


def a_node_is_lost_only_for_a_cause(laws: Laws, events: list[ev.Event]) -> None:
    """A node whose worker lives and could be heard within the grace is not given up."""
    uids: dict[int, str] = {}
    for event in events:
        if isinstance(event, ev.NodeJoined):
            uids[event.node] = event.uid
        elif isinstance(event, ev.NodeLost) and uids[event.node] not in laws.blamed:
            raise LawBroken("a node is lost only for a cause", f"node {event.node}: {event.reason}")


def a_session_is_lost_only_with_its_node(laws: Laws, events: list[ev.Event]) -> None:
    """A session that its user did not close ends with its node, its drained node, or its client."""
    gone: set[int] = set()
    drained: set[int] = set()
    place: dict[int, int] = {}
    expired: set[int] = set()
    for event in events:
        match event:
            case ev.NodeLost(node=node):
                gone.add(node)
            case ev.NodeDraining(node=node):
                drained.add(node)
            case ev.SessionPlaced(session=session, node=node):
                place[session] = node
            case ev.ClientExpired(client=client):
                expired.add(client)
            case ev.SessionClosed(session=session, reason=reason):
                opened = laws.job.sessions_of_users.get(session)
                if opened is None or opened.released or client_of(session) in expired:
                    continue
                if place.get(session, 0) in gone | drained or not laws.job.client_lives(session):
                    continue
                if laws.job.restarted_for_good:
                    continue
                raise LawBroken("a session is lost only with its node",
                                f"{show(session)}: {reason or 'no reason'}")


def named_work_has_one_result(laws: Laws, events: list[ev.Event]) -> None:
    """Everybody who submits a name gets the same result, however often the job was started."""
    values: dict[str, set[str]] = defaultdict(set)
    for one in laws.submissions.values():
        if one.once and one.once not in laws.forgotten and one.value():
            values[one.once].add(one.value())
    for name, found in values.items():
        if len(found) > 1:
            raise LawBroken("named work has one result", f"{name}: {sorted(found)}")


def work_that_was_done_was_done(laws: Laws, events: list[ev.Event]) -> None:
    """A call that was answered with a value has run at least once, and a grant that completed was
    used once."""
    for one in laws.submissions.values():
        if one.kind is Kind.GRANT:
            if one.state() is ActionState.COMPLETED and one.calls != 1:
                raise LawBroken("a grant that completed was used", show(one.id))
        elif one.value() and not one.once and not laws.executions[one.id]:
            raise LawBroken("an answered action has run", show(one.id))


def accounting_agrees_with_the_clients(laws: Laws, events: list[ev.Event]) -> None:
    """Accounting knows each answered action with the state that its client was told, and its own
    number of attempts."""
    fold, lost = Fold(), Counter[int]()  # attempts of which nobody knows whether they had begun
    action_of = dict[int, int]()
    for event in events:
        fold.add(event)
        if isinstance(event, ev.LeaseGranted):
            action_of[event.lease] = event.action
        elif isinstance(event, ev.LeaseFinished) and event.outcome.state is ActionState.NODE_FAIL:
            lost[action_of[event.lease]] += 1
    for one in laws.submissions.values():
        told = one.future.told
        record = fold.records.get(one.id)
        if told is None or (one.once and record is None) or _RESULT_LOST in told[0].outcome.reason:
            continue
        if record is None:
            raise LawBroken("accounting knows every action", show(one.id))
        if one.once and told[0].action != one.id:
            continue
        if record.state is not told[0].outcome.state and not one.once:
            raise LawBroken("accounting agrees with the clients",
                            f"{show(one.id)}: {record.state} is not {told[0].outcome.state}")
        ran = len(laws.executions[one.id]) + lost[one.id]
        if not one.once and one.kind is not Kind.GRANT and record.attempt > max(ran, 1):
            raise LawBroken("accounting counts attempts that were made",
                            f"{show(one.id)}: {record.attempt} attempts, ran {ran} times")


def the_journal_gives_the_ledger(laws: Laws, events: list[ev.Event]) -> None:
    """The replay of the whole journal gives the ledger that the last broker has."""
    laws._same("a replay gives the same ledger", laws.job.scheduler(),
               replay(events, laws._margin_ns))


def an_action_ends_once(laws: Laws, events: list[ev.Event]) -> None:
    """In the journal each lease ends once, under a node that was not given up before."""
    ended: set[int] = set()
    gone: set[int] = set()
    node_of: dict[int, int] = {}
    for event in events:
        match event:
            case ev.LeaseGranted():
                node_of[event.lease] = event.node
            case ev.NodeLost(node=node):
                gone.add(node)
            case ev.LeaseFinished(lease=lease, outcome=outcome):
                if lease in ended:
                    raise LawBroken("a lease ends once", str(event))
                ended.add(lease)
                if node_of[lease] in gone and outcome.state is ActionState.COMPLETED:
                    raise LawBroken("a given-up worker's results change nothing", str(event))


def nothing_is_left(laws: Laws, events: list[ev.Event]) -> None:
    """When everything has ended, neither the broker nor a worker keeps anything of it."""
    ledger = laws.job.ledger()
    left = {"leases": ledger.leases, "away": ledger.away, "disconnected": ledger.disconnected,
            "actions": ledger.actions, "sessions": ledger.sessions}
    for what, found in left.items():
        if found:
            raise LawBroken("nothing is left in the broker", f"{what}: {list(found.items())[:2]}")
    for worker in laws.job.living_workers():
        executor, driver = worker.executor, worker.driver
        if executor is None or driver is None or driver.over:
            continue
        for what, kept in (("running", executor.running), ("cleaning", executor.cleaning),
                           ("sandboxes", executor.sandboxes), ("behind", executor.behind),
                           ("results", driver._kept.results), ("leases", driver._open)):
            if kept:
                raise LawBroken("nothing is left at a worker", f"{worker.name} {what}: {kept}")


LAWS_AT_THE_END: tuple[Callable[[Laws, list[ev.Event]], None], ...] = (
    every_submission_is_answered_once, an_answer_is_what_the_work_gave,
    a_client_gets_an_error_only_for_a_cause, a_result_is_lost_only_with_its_node,
    a_node_is_lost_only_for_a_cause, a_session_is_lost_only_with_its_node,
    named_work_has_one_result, work_that_was_done_was_done, accounting_agrees_with_the_clients,
    the_journal_gives_the_ledger, an_action_ends_once, nothing_is_left)
