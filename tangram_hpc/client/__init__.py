"""The client in a trainer's process: actions, sessions, services, rollouts and their futures.

It talks through a channel port and knows no transport. Calls of functions are pickled here; only a
sandbox's function runner unpickles them. How a client finds its broker is in `app/connecting.py`.
"""
