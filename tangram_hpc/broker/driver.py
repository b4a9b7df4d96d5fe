"""The broker's driver: messages become facts, facts go to journal and scheduler, decisions go out.

Law: every fact is appended to the journal before the scheduler handles it; planning happens once a
beat, so a burst of submissions costs one pass; orders to workers leave at the end of the beat,
words to clients when the journal is as safe as its mode promises. Payloads pass through unread.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ..domain import decision as de
from ..domain import event as ev
from ..domain.ids import client_of, show
from ..domain.service import endpoint_of
from ..domain.session import SessionSpec
from ..domain.states import SessionState
from ..ports import Buffer, Clock, Journal, Link, Overflow, Slurm, Spool, Timer, TreeStore
from ..protocol import message as ms
from ..scheduler.handlers.quota_facts import finished, held_by_client, told_by_client
from ..scheduler.policy.admission import refusal, refusal_of_session
from ..scheduler.scheduler import Scheduler
from ..scheduler.state.ledger import SessionEntry
from .declaring import Declaring
from .door import CHECKS, mended, refusal_of
from .draining import Draining
from .ends import Ends
from .judge import SILENCE_S, WATCH_S, Judge
from .once import Once
from .orders import message_of
from .outgoing import LINK_MAX, Outgoing
from .questions.answers import answer
from .sandboxes import Sandboxes
from .satellites import Satellites, SatelliteScripts
from .settings import Settings, Talk
from .sweeping import Sweeping

_MANY = 16  # messages in one beat that make a broker a busy one; leases ahead do so too


class Broker(Declaring, Draining, Sandboxes):
    """Fills nothing, owns nothing but tables of who is on which link and whose payload is where."""

    def __init__(self, scheduler: Scheduler, journal: Journal, clock: Clock, timer: Timer,
                 settings: Settings, on_end: Callable[[], None],
                 spool: Spool | None = None, slurm: Slurm | None = None,
                 scripts: SatelliteScripts | None = None, trees: TreeStore | None = None,
                 overflow: Overflow | None = None,
                 sweep: Callable[[list[str]], None] = lambda owners: None) -> None:
        self.scheduler, self.settings = scheduler, settings
        self._journal, self._clock, self._timer, self._on_end = journal, clock, timer, on_end
        self._slurm = slurm  # None outside of a job
        self._trees, self._saved = trees, {}
        self.satellites = Satellites(
            settings.job, slurm, scripts or SatelliteScripts(), scheduler.ledger, clock, timer,
            self._learn, lambda node, why: self._tell(node, ms.Shutdown(why)))
        self._ends = Ends(slurm, scheduler.ledger, clock, self._learn, settings.slurm_query_s)
        self._clients, self._workers = dict[int, Talk](), dict[int, Talk]()
        self._payloads: dict[int, Buffer] = {}  # by action, until its result is known
        self._outgoing = Outgoing(overflow)
        self._sweeping = Sweeping(sweep, self._now, int(settings.grace_s * 1e9),
                                  lambda name: self._once.in_use(name))
        self._once = Once(scheduler.ledger, spool, self._sweeping.forgotten)
        self._replies: list[tuple[int, ms.Message, Buffer | None]] = []  # (client, word)
        self._touched: dict[int, Link] = {}  # links to flush at the end of the beat
        self._judge = Judge(self._now, self._happen, self.satellites)
        self._liveness = self._judge.liveness
        self._beat_due = False
        self._heard = 0  # messages since the last beat
        self._wake_at = 0
        self.ended = self.over = False  # over: the job's work is done, no broker will come back

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Writes the first event and begins to watch. The scheduler may have been given an earlier
        broker's journal before."""
        s, p = self.settings, self.scheduler.placer
        for fact in self._once.ends_unsaid(self._now()):
            self._happen(fact)
        self._happen(ev.BrokerStarted(self._now(), s.job, p.name, self._journal.mode, s.user,
                                      s.version, p.block_max))
        self._payloads, lost = self._once.resume(self._now())
        for fact in lost:
            self._happen(fact)
        for service in s.services:
            self._happen(ev.ServiceDeclared(self._now(), service))
        for endpoint in s.endpoints:
            self._happen(ev.EndpointDeclared(self._now(), endpoint))
        self._declare_pools(s.rollouts)
        if s.policy is not None:
            self._happen(ev.AllocationsAllowed(self._now(), s.policy))
        self.satellites.start()
        self._timer.after(s.join_s, self._join_ended)
        self._timer.after(WATCH_S, self._watch)
        self._touch()

    def stop(self, reason: str) -> None:
        """Ends in order: workers are told, the journal is closed. Twice is harmless."""
        if self.ended:
            return
        self._beat()
        if self.superseded():
            return
        self.ended = True
        self.satellites.stop()
        self._close_trees()
        self._happen(ev.BrokerStopped(self._now(), reason))
        for talk in [*self._workers.values(), *self._clients.values()]:
            talk.link.send(ms.Shutdown(reason))
            talk.link.flush()
        self._journal.close()
        self._on_end()

    def accept(self, link: Link) -> Talk:
        """A new authenticated link; hand its messages to `receive` with the Talk."""
        return Talk(link)

    # ---- what comes in -----------------------------------------------------------------------

    def receive(self, talk: Talk, message: ms.Message, payload: Buffer | None) -> None:
        """One message of a conversation."""
        if self.ended:
            return
        self._heard += 1
        if (check := CHECKS.get(type(message))) is not None and (why := check(message)):
            self._turn_away(talk, message, why)
        elif talk.client and type(message) is ms.Submit:  # the most frequent
            self._submit(talk, message, payload)
        elif talk.client:
            self._from_client(talk, message, payload)
        elif talk.node:
            self._from_worker(talk, message, payload)
        elif isinstance(message, ms.Hello):
            self._join_client(talk, message)
        elif isinstance(message, ms.WorkerHello):
            self._join_worker(talk, message)
        else:
            self._refuse(talk, "say Hello first")
        self._touch()

    def lost(self, talk: Talk, reason: str) -> None:
        """The link is gone."""
        if talk.client and self._clients.get(talk.client) is talk and not self.ended:
            del self._clients[talk.client]
            self._outgoing.close(talk.client, talk.queue)
            grace = 0 if talk.said_bye else int(self.settings.grace_s * 1e9)
            now = self._now()
            self._happen(ev.ClientLeft(now, talk.client, talk.said_bye, now + grace))
        elif talk.node and self._workers.get(talk.node) is talk and not self.ended:
            del self._workers[talk.node]
            self._liveness.forget(talk.node)
            self._happen(ev.NodeLost(self._now(), talk.node, talk.leaving or reason))
        self._touch()

    def _turn_away(self, talk: Talk, message: ms.Message, why: str) -> None:
        if talk.client:
            ledger = self.scheduler.ledger
            self._say(talk.client, refusal_of(message, why, (ledger.actions, ledger.sessions)))
        else:
            self._refuse(talk, f"{type(message).__name__}: {why}")

    def room(self, talk: Talk) -> None:
        """A conversation's link may have room again for what waits."""
        if talk.queue.words and self._clients.get(talk.client) is talk:
            self._outgoing.pump(talk.client, talk.link, talk.queue)

    def _refuse(self, talk: Talk, text: str) -> None:
        """Ends a conversation, with the reason."""
        talk.link.send(ms.Refused(text))
        talk.link.flush()
        talk.link.close()  # this does not call `lost`
        self.lost(talk, f"its broker refused it: {text}")

    def _mismatch(self, version: int, job: str) -> str:
        if version != ms.PROTOCOL_VERSION:
            return (f"protocol version {version} is not the broker's {ms.PROTOCOL_VERSION}: "
                    "install the same tangram_hpc on both sides")
        return "" if job == self.settings.job else f"this is job {self.settings.job}, not {job}"

    def _join_client(self, talk: Talk, hello: ms.Hello) -> None:
        if why := self._mismatch(hello.version, hello.job):
            return self._refuse(talk, why)
        ledger, s = self.scheduler.ledger, self.settings
        known = ledger.by_uid.get(hello.uid, 0)
        talk.client = known or ledger.next_client
        old = self._clients.get(talk.client)
        if old is not None:
            self._outgoing.close(talk.client, old.queue)
            old.link.close()  # the same client on a new way: the old one is dead
        self._clients[talk.client] = talk
        self._happen(ev.ClientJoined(self._now(), talk.client, hello.uid, hello.name, hello.rank,
                                     hello.size, hello.via))
        self._say(talk.client, ms.Welcome(talk.client, s.job, s.store, self.scheduler.placer.name,
                                          self._journal.mode, s.grace_s, not known))
        for result in self._outgoing.of(talk.client) if known else ():
            self._say(talk.client, result)

    def _join_worker(self, talk: Talk, hello: ms.WorkerHello) -> None:
        if why := self._mismatch(hello.version, hello.job):
            return self._refuse(talk, why)
        s, now = self.settings, self._now()
        talk.node = self.scheduler.ledger.next_node
        self._workers[talk.node] = talk
        self._liveness.hear(talk.node, now)
        self._tell(talk.node, ms.WorkerWelcome(talk.node, s.store, s.kill_wait_s, s.output_max))
        self._happen(ev.NodeJoined(now, talk.node, hello.spec))
        if self.draining:
            self._happen(ev.NodeDraining(now, talk.node, self.draining))
        if len(self._workers) >= s.nodes:
            self._stop_waiting_for_nodes()

    def _join_ended(self) -> None:
        """Nodes had their time to join; that in which the broker did not run is added once."""
        missed_s = 0.0 if self.ended else self._judge.missed_s()
        if missed_s:
            self._timer.after(min(self.settings.join_s, missed_s), self._join_ended)
        else:
            self._stop_waiting_for_nodes()

    def _stop_waiting_for_nodes(self) -> None:
        if not self.scheduler.ledger.complete and not self.ended:
            self._happen(ev.NodesComplete(self._now(), len(self._workers)))
            self._touch()

    def _from_client(self, talk: Talk, message: ms.Message, payload: Buffer | None) -> None:
        match message:
            case ms.Ack(actions=actions):
                own = tuple(action for action in actions if client_of(action) == talk.client)
                self._outgoing.acknowledged(talk.client, own)
                self._happen(ev.ActionAcknowledged(self._now(), own))
            case ms.RequestSession(spec=spec, again=again):
                self._request_session(talk, spec, again)
            case ms.ReleaseSession(session=session):
                if client_of(session) == talk.client:
                    self._happen(ev.SessionClosing(self._now(), session, ""))
            case ms.RenewSession(session=session):
                if client_of(session) == talk.client and session in self.scheduler.ledger.sessions:
                    self._happen(ev.SessionRenewed(self._now(), session))
            case ms.Cancel(actions=actions):
                for asked in actions:
                    action = self._once.leader(asked)
                    if client_of(asked) == talk.client and action in self.scheduler.ledger.actions:
                        self._happen(ev.ActionCancelled(self._now(), action, "by its client"))
            case ms.Ask():
                self._answer(talk, message)
            case ms.Forget(request=request, names=names, prefix=prefix):
                told = json.dumps({"forgotten": self._once.forget(names, prefix)}).encode()
                self._say(talk.client, ms.Answer(request), told)
            case ms.DeclareService() | ms.DeclareEndpoint() | ms.DeclareRollouts():
                self._declare(talk.client, message)
            case ms.ToolReturned() | ms.EndTrajectory():
                self._of_trajectory(talk.client, message)
            case ms.Done():
                for fact in told_by_client(self.scheduler.ledger, talk.client, message.action,
                                           message.lease, mended(message.outcome), self._now()):
                    self._happen(fact)
            case ms.Ping(stamp=stamp):
                self._say(talk.client, ms.Pong(stamp))
            case ms.Bye():
                talk.said_bye = True
            case ms.Shutdown(reason=reason):
                self.over = True
                self._timer.after(0, lambda: self.stop(reason or "asked to by a client"))
            case _:
                self._turn_away(talk, message, "a client does not say it")

    def _submit(self, talk: Talk, message: ms.Submit, payload: Buffer | None) -> None:
        action = message.action
        if client_of(action.id) != talk.client:
            why = f"id: {show(action.id)} is not this client's"
        elif action.id in self.scheduler.ledger.actions:
            return self._say_granted(action.id)  # again after a reconnect: it is on its way
        elif action.once and (known := self._once.answer(action))[0]:
            return self._say(talk.client, *known[1]) if known[1] is not None else None
        else:
            why = refusal(self.scheduler.ledger, self.scheduler.placer, action)
        if payload is None:
            why = why or "n: the Submit came without its payload"
        elif action.once and not why:
            why = self._once.keep(action, payload)
        if why or payload is None:
            return self._say(talk.client, ms.Rejected(action.id, why, why.startswith("session:")))
        self._payloads[action.id] = payload
        self._happen(ev.ActionSubmitted(self._now(), action))

    def _say_granted(self, action: int) -> None:
        lease = held_by_client(self.scheduler.ledger, action)
        if lease is not None:
            endpoint = self.scheduler.ledger.endpoints[endpoint_of(lease.key)]
            self._say(client_of(action), ms.Granted(action, lease.lease, endpoint.rate_micro,
                                                    endpoint.spec.burst_micro))

    def _request_session(self, talk: Talk, spec: SessionSpec, again: bool) -> None:
        entry = self.scheduler.ledger.sessions.get(spec.id)
        if entry is not None and client_of(spec.id) == talk.client:
            if entry.state in (SessionState.IDLE, SessionState.BUSY):
                self._say_up(entry)  # the word may have been lost with the way
            return
        if again and spec.id <= self.scheduler.ledger.clients[talk.client].last_session:
            gone = f"session {show(spec.id)} was closed while its client was away"
            self._say(talk.client, ms.SessionDown(spec.id, gone))
            return
        why = refusal_of_session(self.scheduler.ledger, self.scheduler.placer, spec)
        if client_of(spec.id) != talk.client:
            why = f"id: {show(spec.id)} is not this client's"
        if why:
            self._say(talk.client, ms.Rejected(spec.id, why, why.startswith("origin:")))
        else:
            self._happen(ev.SessionRequested(self._now(), spec))

    def _from_worker(self, talk: Talk, message: ms.Message, payload: Buffer | None) -> None:
        now = self._now()
        self._liveness.hear(talk.node, now)
        match message:
            case ms.Finished(lease=lease, outcome=outcome, clean=clean):
                if self._owns(talk, lease):
                    end = ev.LeaseFinished(now, lease, mended(outcome), clean)
                    pushed = end.outcome.pushed
                    for fact in finished(self.scheduler.ledger, end) if pushed else (end,):
                        self._happen(fact, payload)
            case ms.Released(lease=lease):
                if self._owns(talk, lease):
                    self._happen(ev.LeaseReleased(now, lease))
            case ms.Returned(leases=leases):
                for lease in leases:
                    if self._owns(talk, lease):
                        self._happen(ev.LeaseReturned(now, lease))
            case ms.Leaving(reason=reason):
                talk.leaving = reason
                self._drain_node(talk.node, reason)
            case ms.Started(leases=leases):
                for lease in leases:
                    if self._owns(talk, lease):
                        self._happen(ev.LeaseStarted(now, lease))
            case ms.Output(id=lease, stream=stream):
                if self._owns(talk, lease):
                    action = self.scheduler.ledger.leases[lease].action
                    self._say(client_of(action), ms.Output(action, stream), payload)
            case ms.SandboxUp() | ms.SandboxDown() | ms.SandboxPacked():
                self._of_sandbox(talk.node, message)
            case ms.Ping(stamp=stamp):
                self._tell(talk.node, ms.Pong(stamp))
            case ms.Pong():
                pass
            case _:
                self._refuse(talk, f"a worker does not say {type(message).__name__}")

    def _owns(self, talk: Talk, lease: int) -> bool:
        """Fencing: a word about a lease counts only from the node that holds it now."""
        entry = self.scheduler.ledger.leases.get(lease)
        return entry is not None and entry.node == talk.node

    def _answer(self, talk: Talk, ask: ms.Ask) -> None:
        told = answer(ask, self.scheduler, self.settings.job, self._slurm, self.satellites,
                      self._now())
        told |= self._of_pools() if ask.what == "rollouts" else {}
        told |= {"unread": self._outgoing.told()} if ask.what == "info" else {}
        self._say(talk.client, ms.Answer(ask.request), json.dumps(told).encode())

    # ---- facts and orders --------------------------------------------------------------------

    def _happen(self, fact: ev.Event, payload: Buffer | None = None) -> None:
        facts = self.scheduler.consequences(fact)
        self._journal.append(facts)
        for each in facts:
            for order in self.scheduler.handle(each):
                self._perform(order, payload)
            if type(each) is ev.ClientExpired:
                self._outgoing.expired(each.client)
                self._sweeping.left(each.client)

    def _perform(self, order: de.Decision, payload: Buffer | None) -> None:
        match order:
            case de.StartLease(node=0):
                self._say_granted(order.action)
            case de.StartLease():
                action = self.scheduler.ledger.actions[order.action].action
                self._tell(order.node, ms.Start(order.lease, action, order.cores, order.gpus,
                                                restore_ns=order.restore_ns, after=order.after),
                           self._payloads[order.action])
            case de.Reply():
                self._reply(order, payload)
            case (de.KillLease() | de.ResizeLease() | de.OpenSession() | de.CloseSession()
                  | de.PackSession() | de.PrepareService()):
                self._tell(order.node, message_of(order))
            case de.AskAllocation():
                self.satellites.ask(order)
            case de.EndAllocation():
                self.satellites.end(order)
            case de.AnnounceSession():
                self._say_up(self.scheduler.ledger.sessions[order.session])
            case de.AnnounceSessionEnd():
                self._say(client_of(order.session), ms.SessionDown(order.session, order.reason,
                                                                    order.never))

    def _say_up(self, session: SessionEntry) -> None:
        node = self.scheduler.ledger.nodes[session.node].spec.name
        self._say(client_of(session.spec.id), ms.SessionUp(
            session.spec.id, node, session.placed_at - session.requested_at))

    def _reply(self, order: de.Reply, payload: Buffer | None) -> None:
        action, ledger = order.action, self.scheduler.ledger
        self._payloads.pop(action, None)
        node = ledger.nodes[order.node].spec.name if order.node else ""
        result = ms.Result(action, order.outcome, node, order.cores, order.attempt,
                           order.queue_ns, order.held_ns, 0 if payload is None else 1,
                           order.grants, order.route)
        if action in ledger.actions:  # its client may still come back for it
            self._outgoing.keep(result, payload)
        self._say(client_of(action), result, payload)
        for other in self._once.ended(result, payload, order.node != 0):
            self._outgoing.keep(other, payload)
            self._say(client_of(other.action), other, payload)

    def _learn(self, fact: ev.Event) -> None:
        """A fact that comes from Slurm."""
        if not self.ended:
            self._happen(fact)
            self._touch()

    def _tell(self, node: int, message: ms.Message, payload: Buffer | None = None) -> None:
        talk = self._workers.get(node)
        if talk is not None:
            talk.link.send(message, payload)
            self._touched[id(talk.link)] = talk.link

    def _say(self, client: int, message: ms.Message, payload: Buffer | None = None) -> None:
        self._replies.append((client, message, payload))

    # ---- the beat ----------------------------------------------------------------------------

    def _touch(self) -> None:
        if not self._beat_due and not self.ended:
            self._beat_due = True
            self._timer.after(0, self._beat)

    def _beat(self) -> None:
        if self.ended or self.superseded():
            return
        self._beat_due, now = True, self._now()
        self._judge.look(now)
        while events := self.scheduler.plan(now):
            for event in events:
                self._happen(event)
            now = self._now()
        touched, self._touched = self._touched, {}
        for link in touched.values():
            link.flush()
        replies, self._replies = self._replies, []
        self._once.commit()
        self._journal.commit(lambda: self._send(replies))
        busy = self._heard >= _MANY or self.scheduler.ledger.ahead > 0
        self._beat_due = busy and self._heard > 0 and self.settings.gap_s > 0
        if self._beat_due:
            self._timer.after(self.settings.gap_s, self._beat)
        self._heard = 0
        self._arm()

    def _send(self, replies: list[tuple[int, ms.Message, Buffer | None]]) -> None:
        touched: dict[int, Link] = {}
        for client, message, payload in () if self.superseded() else replies:
            talk = self._clients.get(client)
            if talk is not None:
                link = talk.link
                if payload is None or talk.queue.words or link.unsent > LINK_MAX:
                    self._outgoing.send(client, link, talk.queue, message, payload)
                else:
                    link.send(message, payload)
                touched[client] = link
        for link in touched.values():
            link.flush()

    def _arm(self) -> None:
        """Asks to be woken when a client's grace ends."""
        deadline = self.scheduler.next_deadline()
        if deadline and not (self._wake_at and self._wake_at <= deadline):
            self._wake_at = deadline
            self._timer.after(max(0.0, (deadline - self._now()) / 1e9) + 0.001, self._wake)

    def _wake(self) -> None:
        self._wake_at = 0
        self._touch()

    def _watch(self) -> None:
        if self.ended or self.superseded():
            return
        self._judge.look(self._now())
        for node in self._liveness.silent(self._now()):
            if (talk := self._workers.get(node)) is not None:
                talk.link.close()
                self.lost(talk, f"silent for {SILENCE_S:.0f} s")
        self.satellites.watch()
        self._ends.watch()
        self._sweeping.watch()
        self._timer.after(WATCH_S, self._watch)

    def _now(self) -> int:
        return self._clock.now_ns()
