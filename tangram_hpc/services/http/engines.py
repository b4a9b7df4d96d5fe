"""Makes the engine behind HTTP that a service's options name.

The API token is read from the environment variable that the options name and from nowhere else, and
it goes into the request's header and nowhere else. No request is sent here.
"""

from __future__ import annotations

import os

from ...config.services import HttpService, SglangService, VllmService, options_of
from ...domain.service import ServiceSpec
from ...errors import InvalidInput
from ...ports import ServiceBackend, ServicePlace, ServiceRefused
from .plain_http import PlainEngine
from .sglang import SglangEngine
from .vllm import VllmEngine
from .web import Web


def make_engine(spec: ServiceSpec, place: ServicePlace) -> ServiceBackend:
    """Returns the engine at the URL of the service's options (serves `ports.MakeServiceBackend`).

    The engine runs on the GPUs that its owner gave it, whatever the place lends.

    Raises:
        ServiceRefused: The options are invalid, the token's variable is not set, or httpx is not
            installed.
    """
    try:
        options = options_of(spec)
    except InvalidInput as error:
        raise ServiceRefused(str(error)) from None
    if not isinstance(options, (HttpService, VllmService, SglangService)):
        raise ServiceRefused(f"service {spec.name}: backend: {spec.backend!r} is no engine behind "
                             "HTTP")
    token = ""
    if options.token_env:
        token = os.environ.get(options.token_env, "").strip()
        if not token:
            raise ServiceRefused(f"service {spec.name}: token_env: {options.token_env} is not set "
                                 "in the environment of this node's worker")
        if not (token.isascii() and token.isprintable()):
            raise ServiceRefused(f"service {spec.name}: token_env: {options.token_env} has "
                                 "characters that no HTTP header may have")
    web = Web(options.url, token, options.timeout_s)
    if isinstance(options, VllmService):
        return VllmEngine(spec.name, web, spec.weights_mib, options)
    if isinstance(options, SglangService):
        return SglangEngine(spec.name, web, spec.weights_mib, options)
    return PlainEngine(spec.name, web, spec.weights_mib, options)
