"""The sessions of one process's trajectories, for frameworks that do not tell when one ends.

Some frameworks make a tool anew for every call, so a session is found by the trajectory's id. The
first call opens the session. The session is closed when the object that stands for the trajectory
in the framework (its owner) is garbage-collected. If a scorer needs the session after that, it is
kept open, and the scorer closes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tangram_hpc import Session

from .process_client import SessionSlot, when_collected


@dataclass(eq=False)
class _Trajectory:
    """One trajectory.

    Attributes:
        owner: the object that stands for it in the framework; None if there is no such object.
        kept: whether its session stays open when the owner is garbage-collected.
        slot: its session.
    """

    owner: weakref.ref[Any] | None
    kept: bool
    slot: SessionSlot = field(default_factory=SessionSlot)

    def is_of(self, owner: object | None) -> bool:
        """Returns whether an object stands for this trajectory."""
        return (None if self.owner is None else self.owner()) is owner


class TrajectorySessions:
    """Sessions by the id of their trajectory. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _Trajectory] = {}

    def get(self, trajectory: str, options: Mapping[str, Any], owner: object | None = None,
            kept: bool = False) -> Session:
        """Returns the session of a trajectory, and opens it if there is none.

        Args:
            trajectory: the trajectory's id. The same id with another owner is another trajectory,
                because a deterministic run uses the same ids in each step.
            options: arguments of `Client.session`, used if the session is opened now.
            owner: the object whose garbage collection ends the trajectory; None if `end` will be
                called.
            kept: whether the session stays open after that, for a scorer that closes it.

        Raises:
            InvalidInput: an option is wrong; the message names it.
            BrokerUnreachable: the broker is gone.
        """
        with self._lock:
            known = self._known.get(trajectory)
            if known is None or not known.is_of(owner):
                former = known
                known = _Trajectory(None if owner is None else weakref.ref(owner), kept)
                self._known[trajectory] = known
                if former is not None and not former.kept:
                    former.slot.close()
                if owner is not None:
                    when_collected(owner, partial(self._owner_ended, trajectory, known))
            return known.slot.session or known.slot.open(options)

    def end(self, trajectory: str) -> None:
        """Forgets a trajectory and closes its session; an unknown one is no error.

        Args:
            trajectory: the trajectory's id.
        """
        with self._lock:
            known = self._known.pop(trajectory, None)
        if known is not None:
            known.slot.close()

    def _owner_ended(self, trajectory: str, ended: _Trajectory) -> None:
        with self._lock:
            if self._known.get(trajectory) is ended:
                del self._known[trajectory]
        if not ended.kept:
            ended.slot.close()
