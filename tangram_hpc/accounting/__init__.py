"""Computes who used how much of what was held, as a pure fold over the journal's events.

It has the records of actions, what allocations held, the columns of `tangram acct`, and the summary
of a job in one line. Nothing here reads a file or prints: `storage/` reads the journal, and `cli/`
prints.
"""
