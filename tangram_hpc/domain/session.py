"""Pure. `SessionSpec`: a trajectory's stateful sandbox as its client asked for it.

A session holds memory from open to close and no cores between its actions (allocate-on-execution,
ARL-Tangram §5.2); a placer that reserves cores for whole sessions (`static:K`) says so by its
placement, not here.
"""

from __future__ import annotations

import msgspec


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a client asks of a session; `id` is minted by the client.

    `component` pins it to nodes of one het component or partition; empty for any. In a `parallel`
    one, actions may run beside each other; in others they run one after another.
    """

    id: int
    name: str = ""
    mem_mib: int = 0
    component: str = ""
    parallel: bool = False
