"""Computes what the job held and how much of it each action used, by folding the journal's events.
Pure.

The package has the records of actions, the usage of allocations, the columns of `tangram acct`, and
the summary of a job in one line. Nothing here reads a file or prints: `storage/` reads the journal,
and `cli/` prints.
"""
