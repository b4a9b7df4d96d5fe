"""Code for E2B's `run_code`: Python interpreters in a sandbox that keep their variables.

`python_kernel` is the program that runs in the sandbox; `code_routes` serves the requests. To the
rest of the job a call is one command of the sandbox.
"""
