"""verl's reward manager that closes each trajectory's sandbox once it is scored.

Use it with the tool's setting `for_scorer: true` if your reward function does not close the sandbox
itself, or does not use the sandbox at all:

    reward:
      reward_manager:
        source: importlib
        name: ClosingRewardManager
        module: {path: pkg://tangram_hpc.hooks.verl.reward_manager}
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from tangram_hpc import TangramError

from .reward_functions import SESSION_FIELD, scoring_session


class ClosingRewardManager(NaiveRewardManager):
    """verl's reward manager `naive`, which also closes the trajectory's sandbox after the
    scoring."""

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Scores one sample; see `RewardManagerBase.run_single`."""
        try:
            return dict(await super().run_single(data))
        finally:
            fields = data[-1:][0].non_tensor_batch.get("tool_extra_fields") or {}
            if fields.get(SESSION_FIELD):
                await asyncio.shield(_closed(fields))


async def _closed(fields: dict[str, Any]) -> None:
    """Closes a sandbox that may be closed already."""
    with contextlib.suppress(TangramError):
        async with scoring_session(fields):
            pass
