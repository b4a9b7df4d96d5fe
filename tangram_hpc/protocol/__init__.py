"""Messages, frames, payloads, authentication, and the rule by which a silent peer counts as lost.

Client, broker, worker and gateway speak what is defined here. So do a worker and its execution
processes (`process_frames.py`), and a worker and its service runners (`service_frames.py`). All of
it is pure: functions of bytes and of times that are handed in. Sockets, MPI and pipes are in
`transport/`.
"""
