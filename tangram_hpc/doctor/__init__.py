"""Checks of a node and its job (`tangram doctor`), one subject a file.

`checkup.py` lists and runs the checks, each in a process with a deadline, and `severity.py` weighs
them. A check uses the same means as the code that does the work, and changes nothing that outlives
it.
"""
