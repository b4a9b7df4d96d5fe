"""Old name of `tangram_hpc.hooks.reference.reference_task`, kept for one release."""

from __future__ import annotations

import sys

from .reference import reference_task

sys.modules[__name__] = reference_task
