"""The client in a trainer's process: actions, sessions, services, rollouts and their futures.

The client sends through the port `Channel` and knows no transport. Calls of functions are pickled
here; only a function runner unpickles them. The search for the broker is in `app/connecting.py`.
"""
