"""Copies of services on a node: which exist, which GPUs they hold, their processes and their calls.

The executor here carries out the calls that a worker was given, in batches. What a model computes
is not known here; that is in `services/http` and `services/torch`.
"""
