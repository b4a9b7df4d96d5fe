"""Who used what of what was held: a pure fold over the journal's events.

Here are records of actions, what allocations held, the columns of `tangram acct`, and a job's
summary in one line. Nothing here reads a file or prints; `storage/` reads the journal, and `cli/`
prints.
"""
