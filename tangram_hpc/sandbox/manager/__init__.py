"""The worker's side of its sandboxes: which one runs which lease, and when one begins and ends.

Here are the executor, the open sessions, the pools of waiting processes, the watchdogs, the
response to memory pressure, and the probes of what isolation works here. No user's code runs in
these modules.
"""
