"""Owns: which backend serves a service. Imports a backend when it is asked for, as each may need
packages that are not here."""

from __future__ import annotations

from ...domain.service import ServiceSpec
from ...ports import ServiceBackend, ServicePlace


def make_backend(spec: ServiceSpec, place: ServicePlace) -> ServiceBackend:
    """A copy of this service that is not loaded yet.

    Raises:
        InvalidInput: nothing serves it.
    """
    raise NotImplementedError
