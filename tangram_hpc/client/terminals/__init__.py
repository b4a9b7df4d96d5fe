"""What a client holds of a shell of a session, and of a command on a terminal.

The package sends what users type and hands on what programs print. It interprets neither; the
sandbox's side is `sandbox/shells/`.
"""
