"""Pure. Decides whether another attempt follows one that ended without success.

The scheduler and accounting both use these functions, so that accounting counts the attempts that
the broker made. The functions must not be called for an action that was cancelled. Actions of a
session never start again: the session's files may have changed, or are gone.
"""

from __future__ import annotations

from .action import Action
from .outcome import Outcome
from .states import ActionState


def is_sent_back(action: Action, outcome: Outcome) -> bool:
    """Whether the action was given back by its endpoint or service, or by a broker that started
    again. It waits again under its old order tag, and the attempt does not count."""
    return outcome.state is ActionState.PREEMPTED and not action.session


def is_retried(action: Action, outcome: Outcome, attempt: int) -> bool:
    """Whether the action starts again because its node failed.

    Args:
        action: the action.
        outcome: how its last attempt ended.
        attempt: which attempt that was, counted from 1.
    """
    return (outcome.state is ActionState.NODE_FAIL and attempt < action.attempts_max
            and not action.session)
