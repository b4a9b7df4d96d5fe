"""Simulates an asynchronous RL run (`tangram sim rl`): rollouts, training, and GPUs lent between
them.

The same router, planner and hybrid pool decide as in a live run; engines, training and faults are
models. Everything follows from a scenario file and its seed. The simulator of CPU and GPU actions
is `simulator/`.
"""
