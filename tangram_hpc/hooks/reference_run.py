"""Old name of `tangram_hpc.hooks.reference.reference_run`, kept for one release."""

from __future__ import annotations

import sys

from .reference import reference_run

sys.modules[__name__] = reference_run
