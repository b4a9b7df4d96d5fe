"""Checks of a node and its job (`tangram doctor`), one subject a file.

`checkup.py` lists and runs the checks, each in a process with a deadline, and `severity.py` says
which failures keep the main job from running. A check calls the same code as the broker or worker
would, and leaves nothing changed behind.
"""
