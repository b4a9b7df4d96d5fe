"""What runs inside: the fork server, a sandbox's init, the function runner and their tools.

These processes start commands one at a time, measure them and leave nothing of them behind. Plain
commands are served by a small library in C (`_fast_path.c`). Which lease runs where is not known
here; `sandbox/manager` decides it.
"""
