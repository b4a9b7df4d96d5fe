"""Pure decisions of the elastic hybrid pool: which rollout replicas join training, and when.

Here are the pool's state machine, the signal that sets its size, and the rule that says whether a
gradient payload may be added. Sockets and processes of the pool are in `libra/live`.
"""
