"""Pure. Decides which actions and sessions are infeasible, and says why the others wait.

An infeasible request is refused at once; the refusal names the field, what the nodes have, and the
remedy. A request that cannot be granted now is pending, with a reason, and never an error. As long
as expected nodes are missing, it is not known what is infeasible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...domain.action import Action, Kind
from ...domain.ids import client_of, show
from ...domain.isolation import (
    BACKENDS,
    HAVE_NETWORKS,
    HAVE_OPEN,
    NEED_IMAGES,
    backend_for,
    guards_without_image,
    lacks_image,
    takes_images,
)
from ...domain.rollouts import NAME_MAX, Turn
from ...domain.service import BLOCK_SIZES, ServiceSpec, endpoint_of, service_of
from ...domain.session import BACKGROUNDS, OPEN, SessionSpec, needs_namespace
from ...domain.states import NodeState, SessionState
from ..placement.eligible_nodes import session_reason
from ..placement.placers.base import Placer
from ..state.ledger import ActionEntry, Ledger, NodeEntry
from .ending import Endings
from .session_life import OPEN_SESSION
from .sharing import may_use, refusal_of_sharing
from .tenant_limits import limit_reason, refusal_by_limits, refusal_of_session_by_limits

NO_GPU = ("gpus: no isolation backend gives a GPU to untrusted code; pass trusted=True if the code "
          "is your own, or use a function or a service")
NO_GUARD = ("trusted: no node here can keep a sandbox from your own files (no bwrap; no Landlock, "
            "or workers that are root); install bubblewrap, or pass trusted=True")


def refusal(ledger: Ledger, placer: Placer, action: Action) -> str:
    """Why this action is infeasible, with the field; empty if it can run, or if that is not known
    because not all expected nodes have joined.
    """
    if action.turn is not None:
        if why := refusal_of_turn(ledger, action):
            return why
        if action != action.unrouted():
            return "key, degrees: a turn needs the key rollouts:POOL of its pool, and degrees (1,)"
        return _misfit_of_turn(ledger, placer, action.turn,
                               ledger.held_nodes() if ledger.complete else [])
    if action.kind is Kind.GRANT:
        return refusal_of_grant(ledger, action) or refusal_by_limits(ledger, action)
    degrees = action.degrees
    if len(degrees) != 1 and (not degrees or list(degrees) != sorted(set(degrees))):
        return f"cpus: {action.degrees} must be ascending whole numbers"
    if degrees[0] < 0 or action.mem_mib < 0 or action.gpus < 0:
        return "cpus, mem, gpus: none may be negative"
    known = action.profile
    if known is not None and (known.work_ns < 0 or not 0 <= known.serial_ppm <= 1_000_000):
        return "profile: work_ns must be 0 or more, serial_ppm from 0 to 1000000"
    if action.key != "cpu" and (why := _unknown_key(ledger, action) or _too_wide(placer, action)):
        return why  # even while nodes join, since placers look up the service that a call names
    if why := refusal_by_limits(ledger, action):
        return why
    nodes: Collection[NodeEntry] = ledger.nodes.values()
    if action.session:
        session = ledger.sessions.get(action.session)
        if session is None or session.state not in OPEN_SESSION:
            return f"session: {show(action.session)} is closed"
        if not may_use(client_of(action.id), session):
            return (f"session: {show(action.session)} is another client's; attach to it with its "
                    "handle, by Client.attach")
        reserve = placer.reserve
        if action.gpus and action.kind is Kind.EXEC and not session.spec.trusted:
            return _too_few_gpus(ledger, action) or NO_GPU
        if reserve and action.key == "cpu" and action.degrees[0] > reserve:
            return (f"cpus: {action.degrees[0]} asked for, {placer.name} gives each "
                    f"session {reserve}")
        nodes = [ledger.nodes[session.node]] if session.node else nodes
    elif action.gpus and action.guarded:
        return _too_few_gpus(ledger, action) or NO_GPU
    if not ledger.complete or _fits(nodes, action):
        return ""
    return misfit(ledger, placer, action, [n for n in nodes if n.state is not NodeState.DOWN])


def _too_wide(placer: Placer, action: Action) -> str:
    """Why the placer never grants this call a block of GPUs; empty if it may, or for an action that
    is no service call.
    """
    service = service_of(action.key)
    return refusal_of_degrees(placer, service, action.degrees) if service else ""


def refusal_of_degrees(placer: Placer, service: str, degrees: Iterable[int]) -> str:
    """Why the placer never grants a call of a service with these degrees; empty if it may."""
    least = min(degrees, default=0)
    if least <= placer.block_max:
        return ""
    most = f"{placer.block_max} GPU{'s' * (placer.block_max > 1)}"
    return (f"degrees: {service} runs on {least} GPUs or more, but placer {placer.name} gives each "
            f"call {most}; let it run on {most}, or choose another placer")


def _too_few_gpus(ledger: Ledger, action: Action) -> str:
    """Why no node lends as many GPUs as the action needs; empty if one does, or if that is not
    known yet. This check precedes the one for `trusted=True`, which would not help where GPUs are
    missing. O(nodes).
    """
    if not ledger.complete:
        return ""
    most = max((len(n.gpus.units) for n in ledger.held_nodes()), default=0)
    if action.gpus <= most:
        return ""
    return (f"gpus: {action.gpus} asked for, the largest node has {most}; workers lend their GPUs, "
            "or what the setting `devices` says")


def _fits(nodes: Iterable[NodeEntry], action: Action) -> bool:
    """Whether one of these nodes can run this action, which must be a CPU action, as nearly all
    are. Nodes after the first that can are not looked at.
    """
    if action.key == "cpu":
        for n in nodes:
            if n.state is not NodeState.DOWN and _holds(n, action, action.degrees[0]):
                return True
    return False


def refusal_of_session(ledger: Ledger, placer: Placer, spec: SessionSpec) -> str:
    """Why this session is infeasible, with the field; empty if it can open or that is not known
    yet.
    """
    if spec.background not in BACKGROUNDS:
        return f"background: {spec.background!r} is not one of {', '.join(BACKGROUNDS)}"
    cpus = spec.background_cpus
    if not cpus or cpus[0] < 1 or list(cpus) != sorted(set(cpus)):
        return f"background_cpus: {cpus} must be ascending whole numbers from 1"
    if spec.background != "run" and cpus != (1,):
        return (f'background_cpus: background={spec.background!r} leases no CPUs; leave it out, or '
                'pass background="run"')
    if min(spec.mem_mib, spec.disk_mib, spec.idle_ns, spec.grace_ns + 1) < 0:
        return "mem, disk, idle_s, grace_s: none may be negative"
    if spec.files:
        return "files: only the broker sets this field; pass `files` to the client's call instead"
    if spec.origin:
        origin = ledger.sessions.get(spec.origin)
        if origin is None or origin.state not in OPEN_SESSION:
            return f"origin: session {show(spec.origin)} is closed"
        if not may_use(client_of(spec.id), origin):
            return (f"origin: session {show(spec.origin)} is another client's; attach to it with "
                    "its handle, by Client.attach")
    if why := (refusal_of_sharing(ledger, spec)
               or refusal_of_session_by_limits(ledger, spec, placer.reserve)):
        return why
    return misfit_of_session(ledger, placer, spec) if ledger.complete else ""


def misfit_of_session(ledger: Ledger, placer: Placer, spec: SessionSpec) -> str:
    """Which field of a session no node can ever satisfy, and the remedy; empty if one can."""
    component, mem = spec.component, spec.mem_mib
    nodes = [n for n in ledger.held_nodes() if n.spec.serves(component)]
    if not nodes:
        return f"component: no node is in {component!r}" if component else ""
    origin = ledger.sessions.get(spec.origin)
    if origin is not None and origin.node:
        nodes = [n for n in nodes if n.node == origin.node]
        if not nodes:
            return f"component: its origin's node is not in {component!r}"
    if why := _no_backend(nodes, spec):
        return why
    nodes = [n for n in nodes if backend_for(n.spec, spec)]
    largest = max(n.spec.mem_mib - n.parked_mib for n in nodes)
    if mem > largest:
        return f"mem: {mem} MiB asked for, the largest node has {largest} MiB"
    reserve = placer.reserve
    most = max(len(n.cores.units) for n in nodes)
    if reserve > most:
        return f"placer: {placer.name} reserves more CPUs than any node has"
    least, given = spec.background_cpus[0], reserve or most
    if spec.background == "run" and least > given:
        return (f"background_cpus: {least} asked for, "
                + (f"{placer.name} gives each session {reserve}" if reserve
                   else f"the largest node has {most}"))
    return ""


def _no_backend(nodes: list[NodeEntry], spec: SessionSpec) -> str:
    """Why none of these nodes has the isolation backend that a session needs; empty if one has it.
    """
    if any(backend_for(n.spec, spec) for n in nodes):
        return ""
    guards = _names(name for n in nodes for name in n.spec.untrusted)
    works = _names(name for n in nodes for name in n.spec.backends)
    if not spec.trusted and not guards:
        return NO_GUARD
    name, image = spec.backend, spec.image
    if name and name not in (*BACKENDS, *works):
        return f"backend: {name!r} is not one of {', '.join(BACKENDS)}"
    if name and name not in works:
        return f"backend: {name!r} works on no node; there is {', '.join(works) or 'none'}"
    if name and not spec.trusted and name not in guards:
        return (f"backend: {name!r} cannot keep a sandbox from your own files here; take "
                f"{' or '.join(guards)}, or pass trusted=True")
    offers = works if spec.trusted else guards
    able = [b for b in offers if takes_images(b)]
    if image and name and not takes_images(name):
        return (f"image: {name!r} takes no image like {image!r}; "
                + (f"take {' or '.join(able)}" if able else "leave it out"))
    if spec.network == OPEN and name and (why := _not_open(nodes, spec)):
        return why
    if why := lacks_image(offers, spec):
        return why
    if needs_namespace(spec.network) and not any(
            b in HAVE_NETWORKS and (image or b not in NEED_IMAGES)
            for b in ((name,) if name else offers)):
        return (f"network: {name or 'no backend here'} has {'no ' if name else 'a '}network of its "
                "own; install bubblewrap on the nodes, or pass network=False or True")
    if spec.network == OPEN and (why := _not_open(nodes, spec)):
        return why
    if image and not able:
        return (f"image: no node has a backend that takes {image!r}; bwrap takes images, and "
                "`tangram doctor` on a node says what it lacks there")
    return "backend: no node has one for this session"


def _not_open(nodes: list[NodeEntry], spec: SessionSpec) -> str:
    """Why no node gives a session an open network; empty if one does."""
    if spec.backend and spec.backend not in HAVE_OPEN:
        return (f"network: {spec.backend} has no open network; take {' or '.join(HAVE_OPEN)}, or "
                "pass a list of names")
    if any(n.spec.open_network for n in nodes):
        return ""
    why = next((n.spec.why_not_open for n in nodes if n.spec.why_not_open),
               "slirp4netns does not work")
    return f"network: no node has an open one ({why}); or pass a list of names, or True"


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def reason(ledger: Ledger, entry: ActionEntry, reserve: int, now: int) -> str:
    """Why a pending action waits, as Slurm's Reason where Slurm has one that fits. `reserve` is the
    placer's.
    """
    if entry.withheld:
        return "ClientNotBack"
    turn = entry.action.turn
    if turn is not None and entry.route is None:
        return ledger.rollouts[turn.pool].why(entry.action.id)
    session = ledger.sessions.get(entry.action.session)
    if session is not None and session.state is SessionState.WAITING:
        return "Session" + session_reason(ledger, session, reserve)
    if session is not None and session.state is SessionState.OPENING:
        return "SessionOpening"
    if session is not None and session.state is SessionState.MOVING:
        return "SessionMoving"
    if session is not None and entry.action.id not in ledger.ready:
        return "SessionBusy"
    if ending_reason(ledger, entry, now):
        return "AllocationEnds"
    if entry.action.kind is not Kind.GRANT and not any(
            could_run(ledger, n, entry.action) for n in ledger.up_nodes()):
        return "ReqNodeNotAvail"
    if why := limit_reason(ledger, entry.action):
        return why
    if endpoint_of(entry.action.key):
        return "Quota"
    return "Resources"


def ending_reason(ledger: Ledger, entry: ActionEntry, now: int) -> str:
    """How the ends of allocations keep a waiting action from every node that could have run it;
    empty if one of these nodes still may. O(nodes).
    """
    if entry.action.id not in ledger.ready or entry.action.kind is Kind.GRANT:
        return ""
    shape, endings = ledger.ready.shape_of(entry.action.id), Endings(ledger, now)
    nodes = [n for n in ledger.held_nodes() if shape.node in (0, n.node)
             and n.spec.serves(shape.component)
             and (not shape.guarded or guards_without_image(n.spec.untrusted))]
    up = [n for n in nodes if n.state is NodeState.UP]
    if not nodes or any(endings.fits(n, shape) for n in up):
        return ""
    if not up:
        return f"its nodes are drained: {nodes[-1].draining}"
    last = max(up, key=lambda n: n.lends_until)
    return (f"it is expected to need {endings.need_ns(last, shape) / 1e9:.1f} s, and no node lends "
            f"for more than {(last.lends_until - now) / 1e9:.1f} s")


def misfit(ledger: Ledger, placer: Placer, action: Action, nodes: list[NodeEntry]) -> str:
    """Which field of an action no node can ever satisfy, and the remedy; empty if one can."""
    if action.kind is Kind.GRANT:
        return refusal_of_grant(ledger, action)
    if action.turn is not None:
        return (refusal_of_turn(ledger, action)
                or _misfit_of_turn(ledger, placer, action.turn, nodes))
    if why := (_unknown_key(ledger, action) or _too_wide(placer, action)
               or refusal_by_limits(ledger, action)):
        return why
    if _fits(nodes, action):
        return ""
    nodes = [n for n in nodes if n.spec.serves(action.component)]
    if not nodes:
        return f"component: no node is in {action.component!r}" if action.component else ""
    if action.guarded:
        nodes = [n for n in nodes if guards_without_image(n.spec.untrusted)]
        if not nodes:
            return NO_GUARD
    need = action.degrees[0]
    if (service := ledger.services.get(service_of(action.key))) and not has_block_for(
            nodes, service, need):
        return (f"degrees: no node has an aligned block of {need} GPUs for {service.name}; workers "
                "lend their GPUs, or what the setting `devices` says")
    need = need if action.key == "cpu" else 0
    most = max(len(n.cores.units) for n in nodes)
    if need > most:
        return f"cpus: {need} asked for, the largest node has {most}"
    most = max(n.spec.mem_mib - n.parked_mib for n in nodes)
    if action.mem_mib > most:
        return f"mem: {action.mem_mib} MiB asked for, the largest node has {most} MiB"
    most = max(len(n.gpus.units) for n in nodes)
    if action.gpus > most:
        return (f"gpus: {action.gpus} asked for, the largest node has {most}; workers lend their "
                "GPUs, or what the setting `devices` says")
    if any(_holds(n, action, need) for n in nodes):
        return ""
    return (f"cpus, mem, gpus: no single node has {need} CPUs, {action.mem_mib} MiB and "
            f"{action.gpus} GPUs")


def _misfit_of_turn(ledger: Ledger, placer: Placer, turn: Turn, nodes: list[NodeEntry]) -> str:
    """Why no service that takes a turn can ever have a block on these nodes; empty if one can, or
    if there are no nodes. O(services x nodes x blocks) where none can.
    """
    needs, too_wide = list[str](), ""
    for each in ledger.rollouts[turn.pool].spec.services if nodes else ():
        service = ledger.services[each.name]
        if each.context_max < turn.context:
            continue
        if each.degree > placer.block_max:
            too_wide = (f"pool: {turn.pool!r} calls {each.name} on {each.degree} GPUs, but placer "
                        f"{placer.name} gives each call {placer.block_max}; set its `degree`, or "
                        "choose another placer")
            continue
        if has_block_for(nodes, service, each.degree):
            return ""
        where = f" of {service.node}" if service.node else ""
        needs.append(f"{each.name} needs {each.degree} GPU{'s' * (each.degree > 1)}{where}")
    if not needs:
        return too_wide
    return (f"pool: no service of {turn.pool!r} that takes {turn.context} tokens fits on a node, "
            f"as none has an aligned block for it: {', '.join(needs)}; hold such a node, or serve "
            "the model on fewer GPUs")


def _holds(n: NodeEntry, action: Action, cpus: int) -> bool:
    return (cpus <= len(n.cores.units) and action.mem_mib <= n.spec.mem_mib - n.parked_mib
            and action.gpus <= len(n.gpus.units)
            and n.spec.serves(action.component)
            and (not action.guarded or guards_without_image(n.spec.untrusted)))


def could_run(ledger: Ledger, n: NodeEntry, action: Action) -> bool:
    """Whether a node could run an action if it lent nothing else, whatever the node's state is."""
    session = ledger.sessions.get(action.session)
    if session is not None:
        return n.node == session.node
    service, least = ledger.services.get(service_of(action.key)), action.degrees[0]
    return (_holds(n, action, least if action.key == "cpu" else 0)
            and (service is None or has_block_for((n,), service, least)))


def has_block_for(nodes: Iterable[NodeEntry], service: ServiceSpec, size: int) -> bool:
    """Whether one of these nodes has an aligned block of this size on which the service may be."""
    return any(service.may_stand(n.spec.name, block)
               for n in nodes for block, _ in n.gpus.blocks[size])


def _unknown_key(ledger: Ledger, action: Action) -> str:
    service, endpoint = service_of(action.key), endpoint_of(action.key)
    if service:
        if service not in ledger.services:
            return f"key: no service {service!r} is declared"
        if not set(action.degrees) <= set(BLOCK_SIZES):
            return f"degrees: {action.degrees}: a service runs on 1, 2, 4 or 8 GPUs"
        if action.mem_mib:
            return "mem: a call uses the memory of its service; leave mem out"
        return ("gpus: `degrees` already says how many GPUs a call uses; leave gpus out"
                if action.gpus else "")
    if endpoint:
        if endpoint not in ledger.endpoints:
            return f"key: no endpoint {endpoint!r} is declared"
        return "" if action.degrees == (1,) else "degrees: a call of an endpoint needs (1,)"
    return "" if action.key == "cpu" else (
        f"key: {action.key!r} is not `cpu`, `service:NAME` or `endpoint:NAME`")


def refusal_of_grant(ledger: Ledger, action: Action) -> str:
    """Why this grant of an endpoint is infeasible, with the field; empty if it can be given."""
    name = endpoint_of(action.key)
    if name not in ledger.endpoints:
        return (f"endpoint: none is declared as {name!r}; declare it by register_endpoint or "
                f"[endpoints.{name}] in the broker's config file")
    if action.degrees != (1,) or action.mem_mib or action.gpus or action.session:
        return "cpus, mem, gpus, session: a grant of an endpoint holds none; leave them out"
    return ""


def refusal_of_turn(ledger: Ledger, action: Action) -> str:
    """Why this turn is infeasible, with the field; empty if it can be routed."""
    turn = action.turn
    assert turn is not None
    pool = ledger.rollouts.get(turn.pool)
    if pool is None:
        return (f"pool: no rollout pool {turn.pool!r} is declared; declare it by register_rollouts "
                f"or [rollouts.{turn.pool}] in the broker's config file")
    if action.kind is not Kind.CALL or action.session or action.mem_mib or action.gpus:
        return "turn: must be a call of a service, without session, mem and gpus"
    if action.component:
        return "component: a turn runs where the services of its pool are; leave it out"
    if not turn.trajectory or len(turn.trajectory.encode()) > NAME_MAX:
        return f"trajectory: {turn.trajectory[:40]!r} is not a name of 1 to {NAME_MAX} bytes"
    if min(turn.context, turn.generated) < 0:
        return "context, generated: none may be negative"
    most = max(s.context_max for s in pool.spec.services)
    if turn.context > most:
        return (f"context: {turn.context} tokens fit on no service of pool {turn.pool!r}, the "
                f"largest takes {most}; serve the model on a larger degree or cut the context")
    return ""
