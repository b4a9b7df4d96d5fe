"""Chooses the backend of a service by the name in its declaration, and builds one copy of it.

A backend is imported only when a service asks for it: torch takes seconds to import, and httpx and
torch are optional. Whatever a backend lacks (a package, a GPU, a valid option) becomes
`ServiceRefused`, one line that names the field and the remedy, before anything is started.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from ..config.services import FakeService, TorchService, options_of
from ..domain.service import ServiceSpec
from ..errors import InvalidInput, how_to_install
from ..ports import ServiceBackend, ServicePlace, ServiceRefused

_TORCH = ("torch", "transformers", "safetensors", "tokenizers")
_ENGINES = ("http", "vllm", "sglang")


def make_backend(spec: ServiceSpec, place: ServicePlace) -> ServiceBackend:
    """Returns a copy of a service for its place (serves `ports.MakeServiceBackend`). Nothing runs
    before `load`.

    Args:
        spec: The service as it was declared.
        place: Which GPUs, threads and scratch folder the copy gets.

    Raises:
        ServiceRefused: A package that the backend needs is not installed, the backend cannot run on
            this place, or the service's options are invalid.
    """
    if spec.backend in _ENGINES:
        from .http.engines import make_engine

        return make_engine(spec, place)
    try:
        options = options_of(spec)
    except InvalidInput as error:
        raise ServiceRefused(str(error)) from None
    if isinstance(options, FakeService):
        from .fake import FakeBackend

        return FakeBackend(options)
    assert isinstance(options, TorchService)
    return _torch(options, place)


def _torch(options: TorchService, place: ServicePlace) -> ServiceBackend:
    if not all(find_spec(name) for name in _TORCH):
        raise ServiceRefused(f"backend: torch needs {how_to_install('torch')}")
    if options.degrees != (1,):
        raise ServiceRefused(f"degrees: torch serves on one GPU, not {options.degrees}; say (1,), "
                             "or use vllm or sglang")
    from ..protocol.service_frames import LoadModel
    from .processes.process import ProcessBackend

    place = replace(place, threads=options.threads or place.threads)
    load = LoadModel(options.model, options.task, options.dtype, options.max_len, place.device,
                     place.threads, options.fresh)
    return ProcessBackend(load, place, options.load_s)
