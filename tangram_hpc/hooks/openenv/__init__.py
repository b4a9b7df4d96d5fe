"""OpenEnv: environment servers that run in sessions.

`container_provider` starts the server of an OpenEnv environment in a session of the job and gives
OpenEnv's client an address of it. Nothing here imports OpenEnv, whose clients accept any object
with the three methods of a container provider.
"""
