"""`python -m tangram_hpc` is the `tangram` command."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
