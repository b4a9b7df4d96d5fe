"""The messages that `hostile_messages` sends: drawn by the generators of the fuzz tests.

Hypothesis draws a pool once, which is the same in every run. What ends whoever gets it by design
(`Shutdown`, `PeerRefused`) is not in it, nor what msgpack cannot carry.
"""

from __future__ import annotations

import sys
from typing import Any

import common
import msgspec

sys.path.insert(0, str(common.HERE.parent / "tests"))
from helpers.absurd_messages import FROM_CLIENT, FROM_WORKER
from helpers.fuzz_inputs import any_of, members
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tangram_hpc.protocol import message as ms

_ENDS = (ms.Shutdown, ms.PeerRefused)
_ANY = st.one_of([any_of(kind) for kind in members(ms.AnyMessage)])
KINDS = {"clients": FROM_CLIENT | _ANY, "workers": FROM_WORKER}


def drawn(sender: str, size: int) -> list[Any]:
    """Returns about so many messages for a kind of sender."""
    found: list[Any] = []

    @settings(max_examples=size, derandomize=True, database=None, deadline=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(KINDS[sender])
    def draw(message: Any) -> None:
        if not isinstance(message, _ENDS) and _travels(message):
            found.append(message)

    draw()
    return found


def _travels(message: Any) -> bool:
    """Whether msgpack can carry the message's numbers."""
    try:
        return bool(msgspec.msgpack.encode(message))
    except (OverflowError, TypeError, ValueError):
        return False
