"""Old name of `tangram_hpc.hooks.reference.__main__`, kept for one release."""

from __future__ import annotations

import importlib
import runpy
import sys

_NEW = "tangram_hpc.hooks.reference.__main__"

if __name__ == "__main__":
    runpy.run_module(_NEW, run_name="__main__", alter_sys=True)
else:
    sys.modules[__name__] = importlib.import_module(_NEW)
