"""The handlers of the scheduler: free functions `on_<event>(state, event)`, one subject a module.

A handler applies one event to the state in O(1), unless it says otherwise, and returns the
decisions that follow. It never plans; that is the task of `placement/`, `policy/`, `routing/` and
`autoscale/`. `scheduler.py` has the table of handlers, `consequences` the events that an event
entails. `queueing` has functions that several handlers use.
"""
