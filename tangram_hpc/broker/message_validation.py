"""Pure. Validates messages of peers, field by field, before the broker does anything with them.

A peer that holds the job's key and follows the protocol may still send wrong values: a number below
zero or beyond 64 bits, an empty tuple, the same core twice, a state that is no end, another
client's id. The wire's decoder checks types; this module checks the bounds of values. Values that
have passed may be counted, indexed and journaled without further checks. Whether they *fit* this
job (the session is open, the component exists) is checked in `scheduler/policy`.

Invariants: no message of a peer may end the broker, and no message of a client closes its
connection, on which its actions and sessions depend. (Bytes that are no message do close it; the
wire's reader handles them.) A check returns one line that names the field, the value and the bound,
or an empty text; the driver decides who gets the line. A check costs O(size of the message). The
check of `Submit` is made for every action and costs a few comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from typing import Any

from ..domain.action import Action, Kind
from ..domain.node import NodeSpec
from ..domain.outcome import TEXT_MAX, Outcome
from ..domain.rollouts import CONTEXT_MAX, COUNT_MAX, NAME_MAX, RolloutsSpec, Turn
from ..domain.service import BLOCK_SIZES, EndpointSpec, ServiceSpec
from ..domain.session import LOOPBACK, OPEN, Network, SessionSpec
from ..domain.session_token import TOKEN_MAX
from ..domain.states import ENDED, ActionState
from ..domain.tenant import TENANT_NAME, TENANT_NAME_SAID
from ..errors import InvalidInput
from ..protocol import auth, input_flow
from ..protocol import message as ms
from ..protocol.allow_list import checked_entries
from ..protocol.port_flow import wrong_port
from ..scheduler.routing.cmlfq import SUCCESS, TIMEOUT
from .snapshots import wrong_question, wrong_report

UNITS_MAX = 1 << 16  # cores or GPUs of a node or an action
AMOUNT_MAX = 1 << 40  # MiB, KiB and other counts
NS_MAX = 10**18  # 31 years; the present time plus twice this is less than 2**63 ns
MICRO_MAX = 10**15  # millionths: of a token, of a call's cost
OPTIONS_MAX = 1 << 20  # bytes of the options for a service's backend
LIST_MAX = 1 << 16  # entries of a list
_ALLOCATION = re.compile(r"\d{1,18}(\+\d{1,9})?")
_DIGEST = re.compile(r"[0-9a-f]{64}(\.[0-9a-z.-]{1,100})?")
_HASH = re.compile(r"[0-9a-f]{64}")
_FILES = {auth.CLIENT: "access.json", auth.WORKER: "worker.json"}
_ENDS = ENDED | {ActionState.PREEMPTED}

Bounds = dict[str, tuple[int, int]]
_ACTION: Bounds = {"id": (1, (1 << 62)), "mem_mib": (0, AMOUNT_MAX), "gpus": (0, UNITS_MAX),
                   "session": (0, 1 << 62), "timeout_ns": (0, NS_MAX),
                   "attempts_max": (1, AMOUNT_MAX)}
_TURN: Bounds = {"prompt": (-(1 << 62), 1 << 62), "context": (0, CONTEXT_MAX),
                 "generated": (0, CONTEXT_MAX)}
_SESSION: Bounds = {"id": (1, 1 << 62), "mem_mib": (0, AMOUNT_MAX), "disk_mib": (0, AMOUNT_MAX),
                    "origin": (0, 1 << 62), "idle_ns": (0, NS_MAX), "grace_ns": (-1, NS_MAX),
                    "ttl_ns": (0, NS_MAX)}
_NODE: Bounds = {"mem_mib": (0, AMOUNT_MAX), "ends_at_ns": (0, 1 << 62), "ahead": (0, LIST_MAX)}
_SERVICE: Bounds = {"restore_ns": (0, NS_MAX), "weights_mib": (0, AMOUNT_MAX),
                    "calls": (0, AMOUNT_MAX), "batch": (1, COUNT_MAX), "stay_ns": (0, NS_MAX)}
_ENDPOINT: Bounds = {"concurrency": (1, COUNT_MAX), "rate_micro": (0, MICRO_MAX),
                     "burst_micro": (1, MICRO_MAX)}
_OUTCOME: Bounds = {
    "exit_code": (-(1 << 31), 1 << 32), "signal": (0, 1 << 16), "exec_ns": (0, NS_MAX),
    "cpu_ns": (0, NS_MAX), "maxrss_kib": (0, AMOUNT_MAX), "restore_ns": (0, NS_MAX),
    "batch": (1, COUNT_MAX), "gpu_util_pct": (-1, 1000), "gpu_max_mem_mib": (-1, AMOUNT_MAX),
    "energy_mj": (-1, 1 << 60), "cost_micro": (0, MICRO_MAX), "pushed": (0, 2),
    "retry_after_ns": (0, NS_MAX), "returned": (0, AMOUNT_MAX), "setup_ns": (-1, NS_MAX),
    "resize_ns": (0, NS_MAX), "direct_calls": (0, AMOUNT_MAX), "direct_ns": (0, NS_MAX)}
_RETURNED: Bounds = {"characters": (0, AMOUNT_MAX), "status": (SUCCESS, TIMEOUT)}
_ENDED: Bounds = {"tokens": (-1, CONTEXT_MAX), "epoch": (-1, AMOUNT_MAX)}
_HELLO: Bounds = {"rank": (-1, AMOUNT_MAX), "size": (0, AMOUNT_MAX)}


def _wrong_submit(message: ms.Submit) -> str:
    # Nearly all actions pass this fast check, which costs a few instructions. Several numbers are
    # checked at once: their OR, shifted, is not 0 if one of them is negative or has a high bit.
    # Admission checks that the degrees between the first and the last ascend.
    action = message.action
    d, session = action.degrees, action.session
    if (action.key == "cpu" and not (action.mem_mib | action.gpus | action.attempts_max) >> 16
            and not (action.id | action.timeout_ns | session) >> 59
            and action.id and action.attempts_max and d and d[-1] <= UNITS_MAX
            and (d[0] > 0 or (d == (0,) and session and action.kind is Kind.FILE))
            and len(action.name) + len(action.component) <= TEXT_MAX
            and len(action.trajectory) <= NAME_MAX // 4 and not action.once
            and action.turn is None and action.profile is None
            and (session or action.kind is not Kind.FILE)
            and action.kind is not Kind.BACKGROUND):
        return ""
    return _wrong_action(action)


def _wrong_action(action: Action) -> str:
    """What is wrong with an action, without regard to the job."""
    return (_out_of(action, _ACTION) or _wrong_degrees(action) or _wrong_names(action)
            or _wrong_kind(action) or _wrong_turn(action.turn))


def _wrong_degrees(action: Action) -> str:
    degrees = action.degrees
    if not degrees or list(degrees) != sorted(set(degrees)) or len(degrees) > UNITS_MAX:
        return f"cpus: {_short(degrees)} is not a list of ascending whole numbers"
    least = 0 if action.kind is Kind.FILE else 1
    if degrees[0] < least or degrees[-1] > UNITS_MAX:
        return f"cpus: {_short(degrees)} is not from {least} to {UNITS_MAX}"
    return ""


def _wrong_names(action: Action) -> str:
    if why := _too_long(action, ("name", "key", "component")):
        return why
    for field in ("once", "trajectory"):
        if len(getattr(action, field).encode()) > NAME_MAX:
            return f"{field}: it has more than {NAME_MAX} bytes"
    known = action.profile
    if known is not None and not (0 <= known.work_ns <= NS_MAX
                                  and 0 <= known.serial_ppm <= 1_000_000):
        return f"profile: work_ns must be from 0 to {NS_MAX}, serial_ppm from 0 to 1000000"
    return ""


def _wrong_kind(action: Action) -> str:
    """Checks that the key, kind, session and degrees of an action belong together. Admission cannot
    do this before all nodes have joined."""
    what, colon, name = action.key.partition(":")
    if action.kind is Kind.BACKGROUND:
        return 'kind: only the broker submits a background action; open a session with ' \
               'background="run"'
    if action.key != "cpu" and not (colon and name and what in ("service", "endpoint", "rollouts")):
        return f"key: {_short(action.key)} is not `cpu`, `service:NAME` or `endpoint:NAME`"
    if (what == "rollouts") != (action.turn is not None):
        return "key: rollouts:POOL belongs to the turns of that pool, and to them alone"
    if (action.kind is Kind.GRANT or action.kind is Kind.FILE) and action.once:
        return f"once: an action of kind {action.kind.value} takes no idempotency key; leave it out"
    if action.kind is Kind.FILE and (action.key != "cpu" or not action.session):
        return "session: a file is read or written in a session"
    if what == "endpoint" and action.degrees != (1,):
        return "degrees: a call of an endpoint needs (1,)"
    if what == "service" and not set(action.degrees) <= set(BLOCK_SIZES):
        return f"degrees: {_short(action.degrees)}: a service runs on 1, 2, 4 or 8 GPUs"
    if what != "cpu" and action.session:
        return (f"session: an action with the key {_short(action.key)} cannot run in a session; "
                "leave it out")
    return ""


def _wrong_turn(turn: Turn | None) -> str:
    if turn is None:
        return ""
    return _out_of(turn, _TURN) or _too_long(turn, ("pool", "trajectory"))


def wrong_session(spec: SessionSpec) -> str:
    """What is wrong with a session, without regard to the job."""
    if len(spec.background_cpus) > UNITS_MAX or any(
            not 0 < cpus <= UNITS_MAX for cpus in spec.background_cpus):
        return f"background_cpus: {_short(spec.background_cpus)} is not from 1 to {UNITS_MAX}"
    return _out_of(spec, _SESSION) or _too_long(
        spec, ("name", "component", "backend", "image", "background", "files", "snapshot")
    ) or _wrong_hashes(spec) or _wrong_network(spec.network)


def _wrong_network(network: Network) -> str:
    if isinstance(network, str):
        known = network in (LOOPBACK, OPEN)
        return "" if known else f"network: {_short(network)} is unknown"
    try:
        if not isinstance(network, bool):
            checked_entries(network)
    except InvalidInput as error:
        return str(error)
    return ""


def _wrong_hashes(spec: SessionSpec) -> str:
    for field in ("attach_hash", "close_hash"):
        if getattr(spec, field) and not _HASH.fullmatch(getattr(spec, field)):
            return f"{field}: it is no hash of a token"
    return ""


def _wrong_attach(word: ms.AttachSession) -> str:
    """What is wrong with a request to attach. The token is never part of the answer."""
    if why := _wrong_request(word):
        return why
    if not 0 < len(word.name) <= NAME_MAX:
        return f"name: {_short(word.name)} is not a name of 1 to {NAME_MAX} characters"
    if not 0 < len(word.token) <= TOKEN_MAX:
        return f"token: it is not a text of 1 to {TOKEN_MAX} characters"
    return ""


def wrong_node(spec: NodeSpec) -> str:
    """What is wrong with a node that a worker lends."""
    if why := _out_of(spec, _NODE):
        return why
    for field in ("cores", "gpus"):
        units = getattr(spec, field)
        if len(units) > UNITS_MAX or len(set(units)) != len(units):
            return f"{field}: {_short(units)}: a node lends each of at most {UNITS_MAX} units once"
        if units and not 0 <= min(units) <= max(units) < 1 << 31:
            return f"{field}: {_short(units)}: unit numbers must be from 0 to 2147483647"
    if not spec.name:
        return "name: must not be empty"
    if spec.allocation and not _ALLOCATION.fullmatch(spec.allocation):
        return f"allocation: {_short(spec.allocation)} is not JOB or JOB+COMPONENT"
    if len(spec.neighbours) > 8 or any(len(sizes) > UNITS_MAX for sizes in spec.neighbours):
        return "neighbours: too many groups"
    if max(len(spec.backends), len(spec.untrusted)) > 64:
        return "backends, untrusted: more than 64"
    for name in (*spec.backends, *spec.untrusted):
        if not 0 < len(name) <= NAME_MAX:
            return f"backends: {_short(name)} is not a name of 1 to {NAME_MAX} characters"
    return _too_long(spec, ("name", "host", "component", "devices", "enforcement",
                            "image_root", "open_network", "why_not_open"))


def wrong_outcome(outcome: Outcome) -> str:
    """What is wrong with a reported outcome of an attempt."""
    if outcome.state not in _ENDS:
        return f"state: {outcome.state.value} is not an end state"
    return _out_of(outcome, _OUTCOME) or _too_long(outcome, ("reason", "isolation", "enforcement"))


def mended(outcome: Outcome) -> Outcome:
    """A valid outcome: the reported one, or a failure that says what was wrong with it. The attempt
    is over in either case, and its lease must end.
    """
    o = outcome  # a fast check, as in `_wrong_submit`
    if (not (o.exec_ns | o.cpu_ns | o.maxrss_kib | o.restore_ns | o.exit_code | o.signal
             | o.returned | o.setup_ns + 1 | o.resize_ns | o.direct_calls | o.direct_ns) >> 40
            and o.batch == 1 and o.gpu_util_pct == -1 == o.energy_mj and o.gpu_max_mem_mib == -1
            and not (o.pushed or o.cost_micro or o.retry_after_ns)
            and (o.state is ActionState.COMPLETED or o.state in _ENDS)
            and len(o.reason) + len(o.isolation) + len(o.enforcement) <= TEXT_MAX):
        return outcome
    why = wrong_outcome(outcome)
    return Outcome(ActionState.FAILED, reason="the worker reported an impossible outcome "
                   f"({why}); see the worker's log") if why else outcome


def _wrong_service(spec: ServiceSpec) -> str:
    if why := _out_of(spec, _SERVICE) or _too_long(spec, ("name", "backend", "shares", "node")):
        return f"service {_short(spec.name)}: {why}"
    if not spec.name:
        return "name: must not be empty"
    degrees = spec.degrees
    if not degrees or list(degrees) != sorted(set(degrees)) or not set(degrees) <= set(BLOCK_SIZES):
        return (f"service {spec.name}: degrees: {_short(degrees)} is not an ascending choice of 1, "
                "2, 4 and 8 GPUs; name at least one")
    if len(spec.options) > OPTIONS_MAX:
        return f"service {spec.name}: options: more than {OPTIONS_MAX} bytes"
    return "" if len(spec.gpus) <= 8 else f"service {spec.name}: gpus: more than 8"


def _wrong_endpoint(spec: EndpointSpec) -> str:
    if not spec.name:
        return "name: must not be empty"
    why = _out_of(spec, _ENDPOINT) or _too_long(spec, ("name",))
    return why and f"endpoint {_short(spec.name)}: {why}"


def _wrong_pool(spec: RolloutsSpec) -> str:
    if not spec.name:
        return "name: must not be empty"
    if max(len(spec.edges), len(spec.services)) > 1024:
        return f"rollouts {_short(spec.name)}: buckets, services: more than 1024"
    return _too_long(spec, ("name", "tree", "rule"))


def _wrong_hello(hello: ms.ClientHello) -> str:
    if not 0 < len(hello.uid) <= NAME_MAX:
        return f"uid: {_short(hello.uid)} is not a text of 1 to {NAME_MAX} characters"
    if hello.tenant and not TENANT_NAME.fullmatch(hello.tenant):
        return f"tenant: {_short(hello.tenant)} {TENANT_NAME_SAID}"
    return _out_of(hello, _HELLO) or _too_long(hello, ("job", "name", "via"))


def _wrong_trajectory(message: ms.ReportToolReturn | ms.EndTrajectory) -> str:
    if len(message.trajectory) > NAME_MAX:
        return f"trajectory: it has more than {NAME_MAX} characters"
    if isinstance(message, ms.EndTrajectory):
        return _out_of(message, _ENDED) or _too_long(message, ("pool",))
    return _out_of(message, _RETURNED) or _too_long(message, ("pool", "tool"))


def _wrong_request(message: Any) -> str:
    return "" if 0 <= message.request <= 1 << 62 else f"request: {message.request} is out of bounds"


def _wrong_input(message: ms.Input) -> str:
    if message.kind == input_flow.SIGNAL and message.number not in input_flow.SIGNALS:
        return f"signal: {message.number} is not one of {input_flow.SIGNALS}"
    if message.kind == input_flow.RESIZE:
        return input_flow.wrong_size((message.number, message.other))
    if not 0 <= message.kind <= input_flow.RESIZE:
        return f"kind: {message.kind} is unknown"
    return ""


def _wrong_packed(message: ms.SandboxPacked) -> str:
    files = message.files
    return "" if _DIGEST.fullmatch(files) else f"files: {_short(files)} is not a digest"


# By class of message: returns what is wrong with a message, naming the field; empty if nothing is.
# Classes that are not listed need no check beyond their types.
CHECKS: dict[type, Callable[[Any], str]] = {
    ms.Submit: _wrong_submit,
    ms.RequestSession: lambda m: wrong_session(m.spec),
    ms.AttachSession: _wrong_attach,
    ms.ClientHello: _wrong_hello,
    ms.WorkerHello: lambda m: wrong_node(m.spec),
    ms.DeclareService: lambda m: _wrong_request(m) or _wrong_service(m.spec),
    ms.DeclareEndpoint: lambda m: _wrong_request(m) or _wrong_endpoint(m.spec),
    ms.DeclareRollouts: lambda m: _wrong_request(m) or _wrong_pool(m.spec),
    ms.Input: _wrong_input,
    ms.OpenStream: lambda m: wrong_port(m.port),
    ms.StreamCredit: lambda m: "" if m.count >= 0 else "count: it is negative",
    ms.StreamEnded: lambda m: _too_long(m, ("reason", "code")),
    ms.InputCredit: lambda m: "" if m.count >= 0 else "count: it is negative",
    ms.Query: _wrong_request,
    ms.Forget: _wrong_request,
    ms.ReportToolReturn: _wrong_trajectory,
    ms.EndTrajectory: _wrong_trajectory,
    ms.Leaving: lambda m: _too_long(m, ("reason",)),
    ms.Shutdown: lambda m: _too_long(m, ("reason",)),
    ms.SandboxDown: lambda m: _too_long(m, ("reason",)),
    ms.SandboxPacked: _wrong_packed,
    ms.SnapshotReport: wrong_report,
    ms.ManageSnapshot: wrong_question,
}


def mismatch(hello: ms.ClientHello | ms.WorkerHello, role: str, own_job: str) -> str:
    """Returns why a peer that sends its hello cannot be a peer of this broker; empty if it can.

    Args:
        hello: what the peer says first.
        role: what it may be, by the key that it has proven; empty if its link has no keys.
        own_job: the broker's job.
    """
    wanted = auth.CLIENT if isinstance(hello, ms.ClientHello) else auth.WORKER
    if role not in ("", wanted):
        return (f"its key is that of a {role}, so it cannot join as a {wanted}: a {wanted} reads "
                f"{_FILES[wanted]} in the job's folder")
    if hello.version != ms.PROTOCOL_VERSION:
        return (f"protocol version {hello.version} is not the broker's {ms.PROTOCOL_VERSION}: "
                "install the same tangram_hpc on both sides")
    return "" if hello.job == own_job else f"this is job {own_job}, not {hello.job}"


def refusal_of(message: ms.Message, why: str, known: Iterable[Container[int]]) -> ms.Rejected:
    """Returns the message that tells a client that its message was refused.

    The refusal has the id of the message if there is one, else 0 and the message's type in its
    text. Its id is never one in `known`, the ids of open actions, sessions and the like, because
    the client would take the refusal for their end.
    """
    number = 0
    match message:
        case ms.Submit(action=action):
            number = action.id
        case ms.RequestSession(spec=spec):
            number = spec.id
        case (ms.DeclareService() | ms.DeclareEndpoint() | ms.DeclareRollouts() | ms.Query()
              | ms.Forget() | ms.AttachSession() | ms.ManageSnapshot()):
            number = message.request
    if number and not any(number in ids for ids in known):
        return ms.Rejected(number, why)
    return ms.Rejected(0, f"{type(message).__name__}: {why}")


def _out_of(record: Any, bounds: Bounds) -> str:
    for field, (least, most) in bounds.items():
        value = getattr(record, field)
        if not least <= value <= most:
            return f"{field}: {value} is not from {least} to {most}"
    return ""


def _too_long(record: Any, fields: Iterable[str]) -> str:
    for field in fields:
        if len(getattr(record, field)) > TEXT_MAX:
            return f"{field}: it has more than {TEXT_MAX} characters"
    return ""


def _short(value: object) -> str:
    return f"{value!r:.80}"
