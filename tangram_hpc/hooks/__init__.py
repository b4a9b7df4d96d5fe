"""Trainers and agent harnesses on tangram_hpc: thin adapters over client and session, and the
reference trainer.

There is one file or folder for each framework. An adapter adds no scheduling of its own. Several
adapters share these modules: `process_client` (the client of a trainer's process, and sessions that
end with their owner), `trajectory_sessions` (sessions by the id of their trajectory),
`text_episodes` (policies that act in plain text), `tool_answers` (the text that tells a policy how
its command ended) and `code_rewards` (test cases of programs). The adapters of harnesses share the
modules in `harness/`. The modules `reference_*.py` in this folder are old names of the modules in
`reference/`, kept for one release.
"""
