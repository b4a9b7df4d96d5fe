"""What runs as fork server and execution processes: inits of sandboxes, function runners and their
tools.

These processes start commands one at a time, measure them and leave no process of them behind.
Plain commands are served by a small library in C (`_fast_path.c`). Which lease runs where is not
known here; `sandbox/manager` decides it.
"""
