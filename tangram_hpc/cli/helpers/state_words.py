"""The states of actions as people write and read them: Slurm's words and its short codes."""

from __future__ import annotations

CODES = {"PD": "PENDING", "CF": "CONFIGURING", "R": "RUNNING", "CD": "COMPLETED", "F": "FAILED",
         "TO": "TIMEOUT", "OOM": "OUT_OF_MEMORY", "CA": "CANCELLED", "NF": "NODE_FAIL",
         "PR": "PREEMPTED"}
SHORT = {state: code for code, state in CODES.items()}
# states of jobs that actions do not have; programs name them beside others
_NEVER = frozenset({"BF", "BOOT_FAIL", "CG", "COMPLETING", "DL", "DEADLINE", "RQ", "REQUEUED", "RS",
                    "RESIZING", "RV", "REVOKED", "S", "SUSPENDED"})


def parse_states(text: str) -> set[str]:
    """Returns the states that the option --state names, in full or by Slurm's short codes.

    The set is empty for an empty text, and has an empty word if all states of the text are states
    that only jobs have.

    Raises:
        InvalidInput: a word is not a state.
    """
    from ...domain.states import ActionState
    from ...errors import InvalidInput

    named = {word.strip().upper() for word in text.split(",") if word.strip()}
    wanted = {CODES.get(word, word) for word in named - _NEVER}
    if named and not wanted:
        return {""}  # only states that no action has
    for state in sorted(wanted - {s.value for s in ActionState}):
        raise InvalidInput(f"--state: {state!r} is not the state of an action; choose from "
                           f"{', '.join(s.value for s in ActionState)}")
    return wanted
