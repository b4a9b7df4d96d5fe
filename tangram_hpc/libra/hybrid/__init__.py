"""Decides which rollout replicas of the elastic hybrid pool join training, and when. Pure.

The package holds the pool's state machine, the signal that sets its size, and the rule that says
whether a gradient payload may be added. The pool's sockets and processes are in `libra/live`.
"""
