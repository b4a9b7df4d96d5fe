"""The broker's driver: messages become events, events go to journal and scheduler, decisions become
messages.

The driver does all I/O of the broker and decides nothing. A message from a client or worker is
validated and becomes an event. An event is appended to the journal before the scheduler handles
it, and the decisions that `handle` returns become messages. Planning happens once in a scheduling
cycle, at most once in a turn of the loop, so that a burst of submissions costs one pass.

Messages to workers leave at the end of the cycle, those to clients when the journal is as safe as
its mode promises (see `peers`). Payloads pass through unread.

The driver is composed of parts that each receive what they need: `Peers` (connections and queued
messages), `ClientOutbox` (unacknowledged results), `Registration` (declarations, causal trees),
`AttachedSessions` (sessions of several clients), `InputRelay` and `PortRelay` (bytes that are
passed on), `UnacknowledgedResults` (what workers keep), `IdempotencyKeys`, `Satellites` and
`TimeLimitPoller` (Slurm), `StoreGarbage`, `Snapshots`, `FailureDetector` (silent workers).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ..domain import decision as de
from ..domain import event as ev
from ..domain.action import Kind
from ..domain.ids import client_of, show
from ..domain.service import endpoint_of
from ..domain.session import SessionSpec
from ..domain.states import LeaseState, NodeState
from ..ports import Clock, Journal, Link, Slurm, SpillFiles, Spool, Timer, TreeStore
from ..protocol import message as ms
from ..protocol.frame import BUSY_MESSAGES, Buffer
from ..protocol.unconfirmed import COUNTED
from ..scheduler.policy.admission import refusal, refusal_of_session
from ..scheduler.policy.lease_reports import finished, held_by_client, reported_by_client
from ..scheduler.policy.rejoining import awaited_node, repeated, undone
from ..scheduler.scheduler import Scheduler
from ..scheduler.state.ledger import ActionEntry, LeaseEntry, Ledger
from .attached_sessions import AttachedSessions
from .broker_settings import Settings
from .client_outbox import ClientOutbox
from .failure_detector import SILENCE_S, WATCH_S, FailureDetector
from .idempotency import IdempotencyKeys
from .input_relay import InputRelay
from .message_validation import CHECKS, mended, mismatch, refusal_of
from .peers import Peer, Peers, ToClient
from .port_relay import PortRelay
from .queries.query_replies import reply_to
from .queries.recent_actions import RecentActions
from .registration import Registration
from .sandbox_reports import DisownedSandboxes, event_of_report
from .satellites import Satellites, SatelliteScripts
from .snapshots import Snapshots
from .store_garbage import StoreGarbage
from .tenancy import is_to_be_named, refusal_of_tenant
from .time_limit_poller import TimeLimitPoller
from .turns import Turns, credit_of
from .unacknowledged import UnacknowledgedResults, loss_of_result, result_of
from .worker_messages import message_of

_POLL_S = 0.1  # between two checks of something that ends without an event
_CLIENTS_WAIT_NS = 2 * 10**9  # how long new clients wait for the workers of an earlier broker
PLAIN_EVENTS = frozenset({ev.ActionSubmitted, ev.LeaseGranted, ev.LeaseStarted, ev.LeaseFinished})


class Broker:
    """The broker of one job: it does the I/O around the scheduler, as the module's docstring
    describes.

    Args:
        scheduler: has handled the journals of earlier starts already, if there were any.
        journal: receives every event before the scheduler does.
        clock: the time of all events.
        timer: calls back on the loop that also calls this object.
        settings: the values that the broker is given.
        on_end: called once, when the broker has ended.
        spool: keeps calls and results of actions with an idempotency key; None: keys are refused.
        slurm: None outside of a Slurm job.
        scripts: the batch scripts and the environment with which satellites are submitted.
        trees: keeps what rollout pools learned; None: nothing is kept.
        spill: holds results of clients that do not read them; None: they stay in memory.
        sweep: begins to remove the entries of some owners from the store, and returns at once.
        checkpoint: called with the ledger after each commit; keeps it now and then, so that the
            next broker need not replay all events.

    Attributes:
        scheduler: see above.
        settings: see above.
        satellites: the Slurm jobs that this broker submitted.
        turns: how many messages of a connection come before those of the others.
        draining: why no node lends any more; empty while nodes lend.
        ended: whether the broker was stopped or superseded; it then handles nothing more.
        over: whether a client declared the job's work done, so that no broker will come back for
            it.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal, clock: Clock, timer: Timer,
                 settings: Settings, on_end: Callable[[], None],
                 spool: Spool | None = None, slurm: Slurm | None = None,
                 scripts: SatelliteScripts | None = None, trees: TreeStore | None = None,
                 spill: SpillFiles | None = None,
                 sweep: Callable[[list[str]], None] = lambda owners: None,
                 checkpoint: Callable[[Ledger], object] = lambda ledger: None) -> None:
        self.scheduler, self.settings = scheduler, settings
        self._journal, self._timer, self._on_end = journal, timer, on_end
        self._now, self._slurm, self._checkpoint = clock.now_ns, slurm, checkpoint
        self._outbox = ClientOutbox(spill)
        self._peers = Peers(self._outbox)
        self.satellites = Satellites(
            settings.job, slurm, scripts or SatelliteScripts(), scheduler.ledger, clock, timer,
            self._record_slurm_event,
            lambda node, why: self._peers.send_to_worker(node, ms.Shutdown(why)))
        self._time_limits = TimeLimitPoller(slurm, scheduler.ledger, clock,
                                            self._record_slurm_event, settings.slurm_query_s)
        self._registration = Registration(scheduler, trees, timer, self._now, self._record_event,
                                          self._peers.send_to_client)
        self._attached = AttachedSessions(scheduler.ledger, self._now, self._record_event,
                                          self._peers.send_to_client)
        self._garbage = StoreGarbage(sweep, self._now, int(settings.grace_s * 1e9),
                                  lambda name: self._keys.in_use(name),
                                  lambda client: client in scheduler.ledger.clients)
        self._keys = IdempotencyKeys(scheduler.ledger, spool, self._garbage.forgotten)
        self._snapshots = Snapshots(scheduler.ledger, self._now, self._peers.send_to_worker,
                                    self._peers.send_to_client, sweep, timer)
        self._results = UnacknowledgedResults(scheduler.ledger, self._peers, self._outbox)
        self._failure_detector = FailureDetector(self._now, self._record_event, self.satellites)
        self._liveness = self._failure_detector.liveness
        self._disowned = DisownedSandboxes()
        self._input = InputRelay(scheduler.ledger, self._peers)
        self._ports = PortRelay(scheduler.ledger, self._peers)
        self._payloads: dict[int, Buffer] = {}  # the input payloads of open actions, by action id
        self._recent = RecentActions()
        self.turns = Turns(scheduler.ledger, self._now, settings.gap_s)
        self._cycle_due = False  # a cycle is on the timer
        self._received = 0  # messages since the last cycle
        self._wakes: list[int] = []  # deadlines (epoch ns) that are on the timer, the nearest last
        self._clients_at = 0  # until when clients wait for workers that are away (epoch ns)
        self.draining = ""
        self.ended = self.over = False

    # ---- beginning and end -------------------------------------------------------------------

    def start(self) -> None:
        """Records the first events and begins to watch.

        Raises:
            InvalidInput: a rollout pool of the settings is wrong.
        """
        s, p = self.settings, self.scheduler.state.placer
        for event in self._keys.unrecorded_ends(self._now()):
            self._record_event(event)
        until = self._now() + int(s.rejoin_s * 1e9) if s.rejoin_s else 0
        if until:
            self._clients_at = self._now() + _CLIENTS_WAIT_NS
            self._record_event(ev.BrokerStalled(self._now(), int(s.down_s * 1e9)))
        self._record_event(ev.BrokerStarted(self._now(), s.job, p.name, self._journal.mode, s.user,
                                            s.version, p.block_max, until, s.granted_at,
                                            s.account))
        for result in self._results.resume(self._keys.spooled):
            self._keys.found_again(result, None)
        self._payloads = self._keys.resume()
        self._registration.start(s)
        if s.policy is not None:
            self._record_event(ev.AllocationsAllowed(self._now(), s.policy))
        self.satellites.start()
        self._peers.take_messages()  # nobody is connected: clients get their results when they join
        self._timer.after(s.join_s, self._join_time_is_over)
        self._timer.after(WATCH_S, self._watch)
        self._request_cycle()

    def stop(self, reason: str) -> None:
        """Tells every peer the reason, closes the journal and ends. A second call does nothing."""
        if self.ended:
            return
        self._run_cycle()
        if self.superseded():
            return
        self.ended = True
        self.satellites.stop()
        self._registration.close()
        self._record_event(ev.BrokerStopped(self._now(), reason))
        self._peers.shut_down(reason)
        ended = self._keys.commit()
        self._journal.close()
        self._keys.committed(ended)
        self._on_end()

    def say_last(self, reason: str) -> None:
        """Tells every peer why the broker ends at once, because it cannot write any more. Nothing
        is journaled. Clients would wait for the next broker otherwise, which could not write
        either.

        Orders that were queued for workers are dropped, since no journal has the events behind
        them: the next broker would give the same actions to other workers.
        """
        self.ended = True
        self._peers.shut_down(reason, discard=True)

    def drain(self, reason: str) -> None:
        """Lends nothing more, not even units of nodes that join later, and requests no more nodes
        from Slurm. Actions that run go on to their end."""
        self.draining = reason
        policy = self.scheduler.ledger.allocs.policy
        if policy.max_nodes:
            self._record_event(ev.AllocationsAllowed(self._now(), policy.closed()))
        for node in self.scheduler.ledger.held_nodes():
            self._drain_node(node.node, reason)
        self._request_cycle()

    def _drain_node(self, number: int, reason: str) -> None:
        """Drains a node for good. A node that was drained only because its allocation ends is
        drained again, since that drain would be undone if the allocation's end moved.
        """
        node = self.scheduler.ledger.nodes[number]
        if node.state is NodeState.UP or node.for_end:
            self._record_event(ev.NodeDraining(self._now(), number, reason))

    def end(self, reason: str, patience_s: float) -> None:
        """Stops; a broker that was drained first waits until nothing runs, at most `patience_s`
        seconds."""
        if not self.draining or not self.scheduler.ledger.leases or patience_s <= 0:
            self.stop(reason)
        elif not self.ended:
            self._timer.after(_POLL_S, lambda: self.end(reason, patience_s - _POLL_S))

    def superseded(self) -> bool:
        """Returns whether another broker has taken this one's place; if so, ends this one."""
        if not self._journal.superseded():
            return False
        self._give_way()
        return True

    def _give_way(self) -> None:
        """Ends without a message to any peer, because another broker serves the job.

        Nothing is committed. The peers will look for the other broker, to which satellites in
        Slurm's queue now belong.
        """
        if not self.ended:
            self.ended = True
            self._registration.stop()
            for peer in self._peers.everyone():
                peer.link.close()
            self._on_end()

    # ---- connections -------------------------------------------------------------------------

    def accept(self, link: Link, role: str = "",
               note_refusal: Callable[[str], None] = lambda why: None) -> Peer:
        """Makes a peer of an authenticated connection; the caller passes the peer to `receive` with
        each message. The arguments are fields of `Peer`.
        """
        return Peer(link, role, note_refusal)

    def lost(self, peer: Peer, reason: str) -> None:
        """Handles the end of a peer's connection."""
        peer.gone = True
        if peer.client and self._peers.clients.get(peer.client) is peer and not self.ended:
            del self._peers.clients[peer.client]
            self._outbox.close(peer.client, peer.queue)
            self._ports.client_lost(peer.client)
            grace = 0 if peer.said_bye else int(self.settings.grace_s * 1e9)
            now = self._now()
            self._record_event(ev.ClientLeft(now, peer.client, peer.said_bye, now + grace))
        elif peer.node and self._peers.workers.get(peer.node) is peer and not self.ended:
            del self._peers.workers[peer.node]
            self._liveness.forget(peer.node)
            self._snapshots.node_lost(peer.node)
            self._ports.worker_lost(peer.node)
            self._record_event(ev.NodeLost(self._now(), peer.node, peer.leaving or reason))
        self._request_cycle()

    def room(self, peer: Peer) -> None:
        """Called after each turn of a peer, and when its connection has taken bytes that waited: it
        may have room for messages that wait.
        """
        self.turns.ended(peer.client)
        if peer.queue.words and self._peers.clients.get(peer.client) is peer:
            self._outbox.pump(peer.client, peer.link, peer.queue)

    def _refuse(self, peer: Peer, text: str) -> None:
        """Ends a connection and tells the peer why."""
        peer.note_refusal(text)
        peer.link.send(ms.PeerRefused(text))
        peer.link.flush()
        peer.link.close()  # this does not call `lost`
        self.lost(peer, f"its broker refused it: {text}")

    def _join_client(self, peer: Peer, hello: ms.ClientHello) -> None:
        ledger, s = self.scheduler.ledger, self.settings
        known = ledger.by_uid.get(hello.uid, 0)
        if why := mismatch(hello, peer.role, s.job) or (
                "" if known else refusal_of_tenant(ledger, s.tenants, hello.tenant)):
            return self._refuse(peer, why)
        peer.client = known or ledger.next_client
        old = self._peers.clients.get(peer.client)
        if old is not None:  # the same client connected again: the older connection is dead
            self._outbox.close(peer.client, old.queue)
            old.link.close()
            self._ports.client_lost(peer.client)
        self._peers.clients[peer.client] = peer
        counted = self._peers.counted.get(peer.client, -1 if known else 0)
        self._peers.counted[peer.client] = max(counted, 0)
        self._record_event(ev.ClientJoined(self._now(), peer.client, hello.uid, hello.name,
                                           hello.rank, hello.size, hello.via))
        if is_to_be_named(ledger, peer.client, hello.tenant):
            self._record_event(ev.TenantNamed(self._now(), peer.client, hello.tenant))
        self._peers.send_to_client(peer.client, ms.Welcome(
            peer.client, s.job, s.store, self.scheduler.state.placer.name, self._journal.mode,
            s.grace_s, not known, counted, s.epoch, credit_of(ledger),
            max(s.output_max, s.output_bound)))
        for result in self._outbox.of(peer.client) if known else ():
            self._peers.send_to_client(peer.client, result)
        self._input.rejoined(peer.client)

    def _join_worker(self, peer: Peer, hello: ms.WorkerHello) -> None:
        ledger, s, now = self.scheduler.ledger, self.settings, self._now()
        back = awaited_node(ledger, hello.node, hello.uid)
        if why := mismatch(hello, peer.role, s.job):
            return self._refuse(peer, why)
        if hello.node and not back:
            return self._refuse(peer, f"node {hello.node} was given up while its worker was away")
        peer.node, peer.keeps = back or ledger.next_node, bool(hello.uid)
        self._peers.workers[peer.node] = peer
        self._liveness.hear(peer.node, now)
        self._peers.send_to_worker(
            peer.node, ms.WorkerWelcome(peer.node, s.store, s.kill_wait_s, s.output_max,
                                        s.output_bound, s.epoch))
        if back:
            self._rejoin(back, hello)
        else:
            self._record_event(ev.NodeJoined(now, peer.node, hello.spec, hello.uid))
        if self.draining and not ledger.nodes[peer.node].draining:
            self._record_event(ev.NodeDraining(now, peer.node, self.draining))
        if len(self._peers.workers) >= s.nodes:
            self._stop_waiting_for_nodes()

    def _rejoin(self, node: int, hello: ms.WorkerHello) -> None:
        """Goes on with a worker of the broker before this one."""
        ledger, leases, sessions = self.scheduler.ledger, set(hello.leases), set(hello.sessions)
        for event in undone(ledger, node, leases, sessions, self._now()):
            self._record_event(event)
        self._record_event(ev.NodeRejoined(self._now(), node))
        self._disowned.add(node, sessions.difference(ledger.nodes[node].sessions))
        for order in repeated(ledger, node, leases, sessions):
            self._perform(order, None, self._now())
        self._lose_results(self._results.not_held(node, leases))

    def _join_time_is_over(self) -> None:
        """Ends the time that workers had to join; time without the broker is added to it once."""
        missed_s = 0.0 if self.ended else self._failure_detector.missed_s()
        if missed_s:
            self._timer.after(min(self.settings.join_s, missed_s), self._join_time_is_over)
        else:
            self._stop_waiting_for_nodes()

    def _stop_waiting_for_nodes(self) -> None:
        if not self.scheduler.ledger.complete and not self.ended:
            self._record_event(ev.NodesComplete(self._now(), len(self._peers.workers)))
            self._request_cycle()

    # ---- messages that come in ---------------------------------------------------------------

    def receive(self, peer: Peer, message: ms.Message, payload: Buffer | None) -> None:
        """Handles one message of a peer."""
        if self.ended:
            return
        self._received += 1
        if type(message) in COUNTED and peer.client and not self._peers.count(peer):
            return
        if (check := CHECKS.get(type(message))) is not None and (why := check(message)):
            self._reject(peer, message, why)
        elif type(message) is ms.Submit and peer.client:  # the most frequent message comes first
            self._submit(peer, message, payload)
        elif peer.client:
            self._from_client(peer, message, payload)
        elif peer.node:
            self._from_worker(peer, message, payload)
        elif isinstance(message, ms.ClientHello):
            if self.scheduler.ledger.away and self._now() < self._clients_at:
                self._timer.after(_POLL_S, lambda: self._receive_later(peer, message))
            else:
                self._join_client(peer, message)
        elif isinstance(message, ms.WorkerHello):
            self._join_worker(peer, message)
        else:
            self._refuse(peer, "the first message must be a Hello")
        if not self._cycle_due:
            self._request_cycle()

    def _receive_later(self, peer: Peer, hello: ms.ClientHello) -> None:
        """Receives the hello of a client again, which came before the workers were back: it may ask
        for something that only they know, such as a snapshot."""
        if not peer.gone:
            self.receive(peer, hello, None)

    def _reject(self, peer: Peer, message: ms.Message, why: str) -> None:
        """Answers a message that is wrong. A client keeps its connection, since its actions and
        sessions depend on it; any other peer is refused."""
        if peer.client:
            ledger = self.scheduler.ledger
            self._peers.send_to_client(
                peer.client, refusal_of(message, why, (ledger.actions, ledger.sessions)))
        else:
            self._refuse(peer, f"{type(message).__name__}: {why}")

    def _from_client(self, peer: Peer, message: ms.Message, payload: Buffer | None) -> None:
        client, ledger = peer.client, self.scheduler.ledger
        match message:
            case ms.Ack(actions=actions):
                self._acknowledged(client, tuple(
                    [action for action in actions if client_of(action) == client]))
            case ms.RequestSession(spec=spec, again=again):
                self._request_session(client, spec, again, payload)
            case ms.ReleaseSession(session=session):
                self._attached.close(client, session)
            case ms.RenewSession(session=session):
                self._attached.renew(client, session)
            case ms.AttachSession():
                self._attached.attach(client, message)
            case ms.DetachSession(session=session):
                self._attached.detach(client, session)
                if client_of(session) != client:
                    self._ports.detached(client, session)
            case ms.Cancel(actions=actions):
                for asked in actions:
                    action = self._keys.leader(asked)
                    if client_of(asked) == client and action in ledger.actions:
                        self._record_event(
                            ev.ActionCancelled(self._now(), action, "by its client"))
            case ms.Input():
                if why := self._input.from_client(client, message, payload):
                    self._reject(peer, message, why)
            case ms.OpenStream() | ms.StreamData() | ms.StreamCredit() | ms.StreamEnded():
                self._ports.from_client(client, message, payload)
            case ms.Query():
                self._answer(client, message)
            case ms.Forget(request=request, names=names, prefix=prefix):
                forgotten = json.dumps({"forgotten": self._keys.forget(names, prefix)}).encode()
                self._peers.send_to_client(client, ms.QueryReply(request), forgotten)
            case ms.ManageSnapshot():
                self._snapshots.manage(client, message)
            case ms.DeclareService() | ms.DeclareEndpoint() | ms.DeclareRollouts():
                self._registration.declare(client, message)
            case ms.ReportToolReturn() | ms.EndTrajectory():
                self._registration.report(client, message)
            case ms.GrantEnded():
                for event in reported_by_client(ledger, client, message.action, message.lease,
                                            mended(message.outcome), self._now()):
                    self._record_event(event)
            case ms.Ping(stamp=stamp):
                self._peers.send_to_client(client, ms.Pong(stamp, credit_of(ledger)))
                if held := self._results.lost_but_held(client):
                    self._acknowledged(client, held)
            case ms.Bye():
                peer.said_bye = True
            case ms.Shutdown(reason=reason):
                self.over = True
                self._timer.after(0, lambda: self.stop(reason or "asked to by a client"))
            case _:
                self._reject(peer, message, "a client may not send this message")

    def _submit(self, peer: Peer, message: ms.Submit, payload: Buffer | None) -> None:
        action = message.action
        if client_of(action.id) != peer.client:
            why = f"id: {show(action.id)} is not this client's"
        elif (known := self.scheduler.ledger.actions.get(action.id)) is not None:
            return self._submitted_again(known, payload)
        elif action.once and (replies := self._keys.settle(action)) is not None:
            for reply in replies:
                self._peers.send_to_client(peer.client, *reply)
            return
        else:
            why = refusal(self.scheduler.ledger, self.scheduler.state.placer, action)
        if payload is None:
            why = why or "n: the Submit came without its payload"
        elif action.once and not why:
            why = self._keys.keep(action, payload)
        if why or payload is None:
            return self._peers.send_to_client(
                peer.client, ms.Rejected(action.id, why, why.startswith("session:")))
        self._payloads[action.id] = payload
        self._record_event(ev.ActionSubmitted(self._now(), action))

    def _submitted_again(self, entry: ActionEntry, payload: Buffer | None) -> None:
        """Handles the submission of a known action, by a client that connected again. A broker that
        was started again needs the payload.
        """
        action = entry.action.id
        if entry.withheld and payload is not None:
            self._payloads[action] = payload
            self._record_event(ev.ActionResubmitted(self._now(), action))
        elif (payload is not None and entry.reply is None
                and self._keys.submitted_again(entry.action, payload)):
            self._payloads[action] = payload
        elif entry.reply is not None and self._results.asked_again(action):
            self._lose_results([action])
        self._send_grant(action)

    def _acknowledged(self, client: int, actions: tuple[int, ...]) -> None:
        """Records that a client has the results of these actions of its own."""
        self._outbox.acknowledged(client, actions)
        self._results.acknowledged(actions)
        self._record_event(ev.ActionAcknowledged(self._now(), actions))

    def _request_session(self, client: int, spec: SessionSpec, again: bool,
                         context: Buffer | None) -> None:
        """Opens a session.

        Args:
            again: the client asks after a reconnect, since it does not know whether its request had
                arrived.
            context: what clients that attach are told.
        """
        ledger = self.scheduler.ledger
        entry = ledger.sessions.get(spec.id)
        if entry is not None and client_of(spec.id) == client:
            self._attached.opened(spec.id, context)  # for a broker that was started again
            self._attached.send_up(entry, client)  # it may have been lost with the connection
            return
        if again and spec.id <= ledger.clients[client].last_session:
            return self._attached.send_ended(client, spec.id)
        spec, why = self._snapshots.filled(spec)
        why = why or refusal_of_session(ledger, self.scheduler.state.placer, spec)
        if client_of(spec.id) != client:
            why = f"id: {show(spec.id)} is not this client's"
        if why:
            self._peers.send_to_client(
                client, ms.Rejected(spec.id, why, why.startswith("origin:")))
        else:
            self._attached.opened(spec.id, context)
            holders = self._snapshots.nodes_with(spec.snapshot)
            self._record_event(ev.SessionRequested(self._now(), spec, holders))

    def _answer(self, client: int, ask: ms.Query) -> None:
        reply = reply_to(ask, self.scheduler, self.settings.job, self._slurm, self.satellites,
                         self._recent, self._now())
        if ask.what == "rollouts":
            reply |= {"rollouts_unsaved": self._registration.unsaved()}
        elif ask.what == "info":
            reply |= {"unread": self._outbox.unread()}
        self._peers.send_to_client(client, ms.QueryReply(ask.request), json.dumps(reply).encode())

    def _from_worker(self, peer: Peer, message: ms.Message, payload: Buffer | None) -> None:
        now = self._now()
        self._liveness.hear(peer.node, now)
        if type(message) is ms.Finished:  # faster than a pattern, and most messages are this one
            if (held := self._held(peer, message.lease)) is not None:
                return self._finished(held, message, payload, now)
            return self._take_again(peer.node, message.lease, payload)
        match message:
            case ms.Released(lease=lease):
                if self._held(peer, lease):
                    self._record_event(ev.LeaseReleased(now, lease))
                self._lose_results(self._results.end_wait(peer.node, lease))
            case ms.Returned(leases=leases):
                for lease in leases:
                    if (held := self._held(peer, lease)) is not None and held.may_return:
                        self._record_event(ev.LeaseReturned(now, lease))
            case ms.Leaving(reason=reason):
                peer.leaving = reason
                self._drain_node(peer.node, reason)
            case ms.AttemptsStarted(leases=leases):
                for lease in leases:
                    if self._held(peer, lease):
                        self._record_event(ev.LeaseStarted(now, lease))
            case ms.Output(id=lease, stream=stream):
                if self._held(peer, lease):
                    action = self.scheduler.ledger.leases[lease].action
                    self._peers.send_to_client(
                        client_of(action), ms.Output(action, stream), payload)
            case ms.InputCredit(id=lease, count=count, total=received):
                if self._held(peer, lease):
                    self._input.credit(lease, count, received)
            case ms.StreamData() | ms.StreamCredit() | ms.StreamEnded():
                self._ports.from_worker(peer.node, message, payload)
            case (ms.SandboxUp() | ms.SandboxDown() | ms.SandboxPacked()
                  | ms.BackgroundWants()):
                if not self._disowned.concerns(peer.node, message):
                    report = event_of_report(self.scheduler.ledger, peer.node, message, now)
                    if report is not None:
                        self._record_event(report)
            case ms.SnapshotReport():
                self._snapshots.report(peer.node, message)
            case ms.Ping(stamp=stamp):
                self._peers.send_to_worker(peer.node, ms.Pong(stamp))
            case ms.Pong():
                pass
            case _:
                self._refuse(peer, f"a worker may not send {type(message).__name__}")

    def _finished(self, entry: LeaseEntry, message: ms.Finished, payload: Buffer | None, now: int
                  ) -> None:
        """Records the end of a lease. A worker that came back repeats ends that the journal has
        already, because the broker before this one may have missed that the units are free.
        """
        lease, node = entry.lease, entry.node
        if entry.state is LeaseState.RELEASING:
            if message.clean:
                self._record_event(ev.LeaseReleased(now, lease))
            return self._take_again(node, lease, payload)
        end = ev.LeaseFinished(now, lease, mended(message.outcome), message.clean)
        for event in finished(self.scheduler.ledger, end) if end.outcome.pushed else (end,):
            self._record_event(event, payload)
        self._results.ended(node, lease, entry.action)

    def _take_again(self, node: int, lease: int, payload: Buffer | None) -> None:
        """Takes the result of a lease whose end the journal has already."""
        result = self._results.again(node, lease, payload)
        if result is not None:
            self._keys.found_again(result, payload)

    def _held(self, peer: Peer, lease: int) -> LeaseEntry | None:
        """Fencing: a message about a lease counts only from the node that holds it now."""
        entry = self.scheduler.ledger.leases.get(lease)
        return entry if entry is not None and entry.node == peer.node else None

    # ---- events and decisions ----------------------------------------------------------------

    def _record_event(self, event: ev.Event, payload: Buffer | None = None) -> None:
        """Journals and applies an event with all that it entails, and carries out the decisions.

        Args:
            payload: the result of the attempt whose end the event is.
        """
        if type(event) in PLAIN_EVENTS:  # they come most often, and nothing below concerns them
            self._journal.append((event,))
            for decision in self.scheduler.handle(event):
                self._perform(decision, payload, event.at)
            return
        events = self.scheduler.consequences(event)
        self._journal.append(events)
        lost: list[int] = []
        for each in events:
            gone = each if type(each) is ev.ClientExpired else None
            if gone is not None:
                self._results.acknowledged(self.scheduler.ledger.clients[gone.client].actions)
            for decision in self.scheduler.handle(each):
                self._perform(decision, payload, each.at)
            if gone is not None:
                self._outbox.expired(gone.client)
                self._garbage.client_expired(gone.client)
                self._snapshots.client_gone(gone.client)
                self._peers.counted.pop(gone.client, None)
            elif type(each) is ev.NodeLost:
                lost += self._results.not_held(each.node)
        if lost:
            self._lose_results(lost)

    def _lose_results(self, actions: list[int]) -> None:
        """Records that the results of these actions were lost with their nodes."""
        for action in actions:
            self._record_event(loss_of_result(self._now(), action))

    def _record_slurm_event(self, event: ev.Event) -> None:
        """Records an event that follows from an answer of Slurm."""
        if not self.ended:
            self._record_event(event)
            self._request_cycle()

    def _perform(self, decision: de.Decision, payload: Buffer | None, now: int) -> None:
        if type(decision) is de.ReplyToClient:  # faster than a pattern, and every action has one
            return self._reply(decision, payload, now)
        match decision:
            case de.StartLease() if not decision.node:
                self._send_grant(decision.action)
            case de.StartLease():
                action = self.scheduler.ledger.actions[decision.action].action
                none = action.kind is Kind.BACKGROUND  # nobody sent a payload for it
                self._peers.send_to_worker(
                    decision.node,
                    ms.StartAttempt(decision.lease, action, decision.cores, decision.gpus,
                                    restore_ns=decision.restore_ns, after=decision.after),
                    b"" if none else self._payloads[decision.action])
                self._input.started(decision.action, decision.lease)
            case (de.KillLease() | de.ResizeLease() | de.OpenSession() | de.CloseSession()
                  | de.PackSession() | de.PrepareService()):
                self._peers.send_to_worker(decision.node, message_of(decision))
            case de.AskAllocation():
                self.satellites.ask(decision)
            case de.EndAllocation():
                self.satellites.end(decision)
            case de.AnnounceSession():
                self._attached.send_up(self.scheduler.ledger.sessions[decision.session])
            case de.AnnounceSessionEnd():
                self._attached.send_down(decision)

    def _send_grant(self, action: int) -> None:
        """Tells a client that it may call an endpoint, if `action` holds a grant."""
        lease = held_by_client(self.scheduler.ledger, action)
        if lease is not None:
            endpoint = self.scheduler.ledger.endpoints[endpoint_of(lease.key)]
            self._peers.send_to_client(client_of(action), ms.Granted(
                action, lease.lease, endpoint.rate_micro, endpoint.spec.burst_micro))

    def _reply(self, order: de.ReplyToClient, payload: Buffer | None, now: int) -> None:
        """Sends an action's result to its client, and to clients that submitted the same
        idempotency key.
        """
        action, ledger = order.action, self.scheduler.ledger
        self._recent.note(order, now)
        self._payloads.pop(action, None)
        self._input.ended(action)
        result = result_of(ledger, order, 0 if payload is None else 1)
        entry = ledger.actions.get(action)
        if entry is not None:  # else its client has expired and will not fetch the result
            self._outbox.keep(result, payload)
        self._peers.send_to_client(client_of(action), result, payload)
        if entry is None or entry.action.once:
            for other in self._keys.ended(result, payload, order.node != 0):
                self._outbox.keep(other, payload)
                self._peers.send_to_client(client_of(other.action), other, payload)

    # ---- the scheduling cycle ----------------------------------------------------------------

    def _request_cycle(self) -> None:
        """Runs a cycle when the loop has handled all messages that have arrived by now."""
        if not self._cycle_due and not self.ended:
            self._cycle_due = True
            self._timer.after(0, self._run_cycle)

    def _planned(self, now: int) -> list[ev.Event]:
        """Returns what is to happen next. Actions that nobody could start are ended first."""
        for event in self._keys.unstartable(now):
            self._record_event(event)
        return self.scheduler.plan(now)

    def _run_cycle(self) -> None:
        """Plans until there is nothing to do, then sends all messages."""
        if self.ended or self.superseded():
            return
        self._cycle_due, now = True, self._now()
        self._failure_detector.look(now)
        while events := self._planned(now):
            for event in events:
                self._record_event(event)
            now = self._now()
        self._commit(self._peers.take_messages())
        if not self.ended:  # the commit finds out whether another broker has taken over
            self._checkpoint(self.scheduler.ledger)
        busy = self._received >= BUSY_MESSAGES or self.scheduler.ledger.prefetched > 0
        self._cycle_due = busy and self._received > 0 and self.settings.gap_s > 0
        if self._cycle_due:
            self._timer.after(self.turns.gap_s(), self._run_cycle)
        self._received = 0
        self._wake_at_deadline()

    def _commit(self, messages: list[ToClient]) -> None:
        """Writes what happened, sends the messages to workers, and those to clients as soon as the
        journal is as safe as its mode promises.
        """
        unsent = True

        def deliver() -> None:
            nonlocal unsent
            if self._journal.superseded():
                return self._give_way()
            if unsent:
                unsent = False
                self._peers.flush_workers()
            self._keys.committed(ended)
            self._peers.deliver(messages)

        ended = self._keys.commit()
        self._journal.commit(deliver)
        if unsent and not self.ended and not self.superseded():  # written, and not synced yet
            unsent = False
            self._peers.flush_workers()

    def _wake_at_deadline(self) -> None:
        """Asks the timer for a cycle at the scheduler's next deadline, unless the timer will wake
        the broker before. A wake-up cannot be taken back, and a far deadline often comes again
        after a near one. So all wake-ups are remembered, not only the next.
        """
        deadline = self.scheduler.next_deadline()
        if deadline and not (self._wakes and self._wakes[-1] <= deadline):
            self._wakes.append(deadline)
            self._timer.after(max(0.0, (deadline - self._now()) / 1e9) + 0.001,
                              lambda: self._wake(deadline))

    def _wake(self, deadline: int) -> None:
        self._wakes.remove(deadline)
        self._request_cycle()

    def _watch(self) -> None:
        """Makes the periodic checks, every `WATCH_S` seconds."""
        if self.ended or self.superseded():
            return
        self._failure_detector.look(self._now())
        for node in self._liveness.silent(self._now()):
            if (peer := self._peers.workers.get(node)) is not None:
                peer.link.close()
                self.lost(peer, f"silent for {SILENCE_S:.0f} s")
        self.satellites.watch()
        self._time_limits.watch()
        self._garbage.watch()
        if self._peers.confirm_all():
            self._request_cycle()
        self._timer.after(WATCH_S, self._watch)
