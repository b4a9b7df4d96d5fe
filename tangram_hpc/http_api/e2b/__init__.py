"""The E2B wire: the HTTP interface of the PyPI package `e2b`, and of trainers that use it.

A sandbox of this wire is one shared session of the job. `control_routes` makes, finds, lists and
ends sandboxes; `process_routes`, `filesystem_routes` and `file_routes` serve the requests to one
sandbox. Nothing here schedules or isolates anything: commands are actions of the session, and file
calls are the session's own.
"""
