"""Runs `MODULE WORD...` as `python -m` does. Tests fork this program (helpers/forked_start.py)."""

import runpy
import sys

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
