"""AReaL: an agent whose commands run in a session of its own.

`sandbox_agent` holds the agent, which AReaL loads by its name. Nothing here imports AReaL, whose
agents are plain objects with a coroutine `run`.
"""
