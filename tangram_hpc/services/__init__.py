"""The worker's side of model services: copies of models on GPUs, and the backends that serve them.

`backend_registry.py` finds a backend by name; `processes/` runs copies and their calls, `http/`
speaks to engines that somebody else runs, and `torch/` is our own runner. What a person writes
about a service is checked in `config/services.py`, and the scheduler decides which call may run.

Experimental: `docs/GPUS.md` says what of the torch runner was run on a GPU. The engines were tested
only against fakes of their protocols.
"""
