"""Packs a record of accounting into bytes, and makes it again.

The plain columns of a row are for SQL. They do not hold everything that `tangram acct` can print,
such as each grant of CPUs, so a row has the whole record too. As in the journal, a new field at the
end of a part keeps old rows readable.
"""

from __future__ import annotations

import msgspec

from ...domain.action import Action
from ...domain.node import NodeSpec
from ...domain.outcome import Outcome
from ...domain.rollouts import Routed
from ...domain.states import ActionState
from ...domain.tenant import DEFAULT_TENANT
from ...protocol.reading import reader
from ..record import ActionRecord


class StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    """An `ActionRecord` without what all rows of its job share, and without earlier attempts.

    Attributes:
        action: the action as it was submitted, or a turn as it was routed.
        state: its state.
        submit_ns, start_ns, end_ns: its times, in ns since the epoch; 0 for what has not happened.
        attempt: how often it was started.
        rank: MPI rank of its client; -1 for none.
        outcome: how the attempt ended; None if it did not.
        grants: for each size that its lease had: since when, and the CPUs.
        gpus: the GPUs that it held.
        node: name, host and component of its node; None for none. What else the node lent is not
            kept.
        route: where a turn was routed; None for other actions.
        lost_ahead: whether `attempt` is a lower bound.
        client_name, session_name: names of its client and session; empty for none.
        image: digest of the image of its session; empty for none.
        tenant: the tenant of its client.
    """

    action: Action
    state: ActionState
    submit_ns: int
    start_ns: int
    end_ns: int
    attempt: int
    rank: int
    outcome: Outcome | None
    grants: list[tuple[int, tuple[int, ...]]]
    gpus: tuple[int, ...]
    node: tuple[str, str, str] | None
    route: Routed | None
    lost_ahead: bool
    client_name: str
    session_name: str
    image: str
    tenant: str = DEFAULT_TENANT


_encoder = msgspec.msgpack.Encoder()
_read = reader(StoredRecord)


def pack_record(r: ActionRecord) -> bytes:
    """Returns a record as bytes."""
    node = None if r.node is None else (r.node.name, r.node.host, r.node.component)
    return _encoder.encode(StoredRecord(
        r.action, r.state, r.submit_ns, r.start_ns, r.end_ns, r.attempt, r.rank, r.outcome,
        r.grants, r.gpus, node, r.route, r.lost_ahead, r.client_name, r.session_name, r.image,
        r.tenant))


def unpack_record(data: bytes, job: str, user: str) -> ActionRecord:
    """Returns the record that `pack_record` wrote.

    Args:
        data: the bytes.
        job: the record's job.
        user: who ran the job.

    Raises:
        msgspec.DecodeError: the bytes are no record of this release or an earlier one.
    """
    s: StoredRecord = _read(data)
    node = None
    if s.node is not None:
        name, host, component = s.node
        node = NodeSpec(name, host, (), 0, component=component)
    return ActionRecord(
        job, user, s.action, s.submit_ns, s.rank, s.start_ns, s.end_ns, node, s.attempt, s.outcome,
        s.state, s.grants, s.gpus, s.route, s.lost_ahead, s.client_name, s.session_name, s.image,
        s.tenant)
