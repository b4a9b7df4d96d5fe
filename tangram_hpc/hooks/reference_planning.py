"""Old name of `tangram_hpc.hooks.reference.reference_planning`, kept for one release."""

from __future__ import annotations

import sys

from .reference import reference_planning

sys.modules[__name__] = reference_planning
