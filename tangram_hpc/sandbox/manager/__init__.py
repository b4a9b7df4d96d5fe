"""The worker's side of its sandboxes: which one runs which lease, when one begins and ends.

Here are the executor, the open sessions, the pools of waiting sandboxes, the watches over memory
and over calls that take long, and the probes of what isolation works here. Code of a user never
runs in these modules.
"""
