"""Traffic into a sandbox's network and out of it: streams to its ports, its proxy, and its open
network with the stack that carries it.

Namespaces are made and entered in `sandbox/isolation`; no command of a session is started here.
"""
