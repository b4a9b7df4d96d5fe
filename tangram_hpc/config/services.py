"""Checks a service: `register_service(name, {...})`, or `[services.NAME]` in TOML.

A service is checked before anything is sent, and an error names the wrong field in one line. Each
backend has one class with the fields that it needs. The scheduler sees a service only as a
`ServiceSpec`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from ..domain.service import BLOCK_SIZES, ServiceSpec
from ..errors import InvalidInput
from .first_error import describe_first_error
from .table_rules import SettingsTable, absolute_path, check_name


class Service(SettingsTable):
    """The fields that all services have."""

    degrees: tuple[int, ...] = Field((1,), min_length=1,
                                     description="sizes of the GPU blocks on which it can run")
    batch: int = Field(64, ge=1, le=4096, description="largest number of calls in a batch")
    batch_tokens: int = Field(16384, ge=0, description="largest number of tokens in a batch; 0: no "
                                                       "limit")
    batch_wait_ms: float = Field(2.0, ge=0, le=1000, description="ms that the first call of a "
                                                                 "batch waits for others")
    stay_s: float = Field(0.0, ge=0, le=3600, description="least seconds that the service stays on "
                                                          "a block")
    weights_mib: int = Field(0, ge=0, le=1 << 40,
                             description="host memory of the parked service in MiB; 0: the size of "
                                         "its files")
    copies: int = Field(1, ge=1, le=64, description="copies that a node loads in advance if its "
                                                    "memory suffices; further ones on demand")
    restore_s: float = Field(0.0, ge=0, le=1e9,
                             description="estimated seconds to bring the service to a block, until "
                                         "they have been measured")

    def weights(self) -> int:
        """Returns the host memory that the parked service takes, in MiB."""
        return self.weights_mib

    def shares(self) -> str:
        """Returns the value of `ServiceSpec.shares`: services with equal values share weights.

        The value is empty where a service shares its weights with no other one.
        """
        return ""


class TorchService(Service):
    """A Hugging Face model, served by the runner of this package (extra `torch`)."""

    backend: Literal["torch"]
    model: str = Field(description="folder with config.json, safetensors and a tokenizer")
    task: Literal["causal", "classifier"] = Field(
        "causal", description="causal: logprobs and generate; classifier: score")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    max_len: int = Field(4096, ge=1, description="longest sequence in tokens")
    load_s: float = Field(300.0, gt=0, description="seconds that loading may take, and each move "
                                                   "to or from a GPU")
    fresh: str = Field("", description="folder in which newer weights are published while the "
                                       "model is served; each batch runs on the newest")
    threads: int = Field(0, ge=0, le=1024, description="number of CPU threads; 0: the device's "
                                                       "fraction of the node's cores")

    @field_validator("model", "fresh")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        if info.field_name == "fresh" and not value:
            return value
        return absolute_path(value, "the service's process")

    def weights(self) -> int:
        """Returns `weights_mib`, or if that is 0 the size of the safetensors files in MiB."""
        size = sum(os.path.getsize(file) for file in self._files())
        return self.weights_mib or -(-size >> 20)

    def shares(self) -> str:
        """Returns the real paths of the model's files and its dtype as one text.

        Models with the same files and dtype share weights. A model whose weights are replaced
        while it is served (`fresh`) shares none.
        """
        files = [] if self.fresh else self._files()
        return json.dumps([os.path.realpath(f) for f in files] + [self.dtype]) if files else ""

    def _files(self) -> list[str]:
        # `Path.glob` hides errors of the folder from Python 3.13 on
        try:
            names = os.listdir(self.model)
        except FileNotFoundError:  # it may be on the node alone
            return []
        return sorted(os.path.join(self.model, n) for n in names if n.endswith(".safetensors"))


class EngineService(Service):
    """The fields of all engines that somebody else runs and that are reached by HTTP.

    An engine stays on the GPUs that its owner gave it. `node` and `gpus` say which these are,
    because the scheduler lends them.
    """

    url: str = Field(description="base URL of the engine, such as http://localhost:8000")
    node: str = Field("", description="name of the node whose GPUs the engine has; empty: the only "
                                      "node with GPUs")
    gpus: tuple[int, ...] = Field((0,), min_length=1,
                                  description="the engine's GPUs, by the node's numbers")
    token_env: str = Field("", description="environment variable that holds a bearer token")
    timeout_s: float = Field(600.0, gt=0, description="seconds that an answer may take")

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (
                parts.port is None or parts.port > 0) and not any(map(str.isspace, url))
        except ValueError:
            fits = False
        if not fits:
            raise ValueError("must have the form http://host:port or https://host:port")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must hold no user, password, query or fragment; put a token into the "
                             "environment variable that token_env names")
        return url


class HttpService(EngineService):
    """An engine that speaks plain JSON: one POST for a batch of calls, others to park and wake it.

    - `call_path` gets `{"requests": [{"method": "score", "arguments": {...}}, ...]}` and answers
      `{"replies": [{"value": ...} or {"error": "why this one is wrong"}, ...]}`, in their order. A
      batch that gets a 4xx is sent again, call by call; after a 429 or 503, first as a whole.
    - `park_path` and `wake_path` get no body and answer 2xx when they are done. A second call does
      no harm. When `park_path` has answered, the memory of the GPUs is free.
    - A status of 507, or of 5xx with "out of memory" in its text, says that the model did not fit,
      and that the engine is as it was.
    - `health_path` answers 2xx while the engine lives.
    """

    backend: Literal["http"]
    call_path: str = Field("/call", pattern="^/")
    wake_path: str = Field("", pattern="^(/|$)",
                           description="path of the POST that brings the model to the GPUs; empty: "
                                       "none is sent")
    park_path: str = Field("", pattern="^(/|$)",
                           description="path of the POST that takes the model off the GPUs; empty: "
                                       "it stays there")
    health_path: str = Field("/health", pattern="^(/|$)")


class VllmService(EngineService):
    """A vLLM server, which is reached by OpenAI's API, /sleep and /wake_up.

    Start it with `VLLM_SERVER_DEV_MODE=1` in its environment and with `--enable-sleep-mode`.
    """

    backend: Literal["vllm"]
    model: str = Field(description="the model's name in the server's API")
    sleep_level: Literal[1, 2] = Field(1, description="1: parked weights stay in host memory; 2: "
                                                      "they are dropped and read from disk again")


class SglangService(EngineService):
    """An SGLang server, reached by /generate, /release_memory_occupation,
    /resume_memory_occupation.

    Start it with `--enable-memory-saver --enable-weights-cpu-backup`.
    """

    backend: Literal["sglang"]
    model: str = Field(description="the server's --served-model-name")


class FakeService(Service):
    """A service for tests: it computes nothing, and a call takes as long as its fields say.

    Its answers say that they are fake.
    """

    backend: Literal["fake"]
    wake_s: float = Field(0.0, ge=0)
    park_s: float = Field(0.0, ge=0)
    call_s: float = Field(0.0, ge=0, description="seconds per batch")
    token_s: float = Field(0.0, ge=0, description="seconds per token of a batch")


_KINDS: dict[str, type[Service]] = {"torch": TorchService, "http": HttpService,
                                    "vllm": VllmService, "sglang": SglangService,
                                    "fake": FakeService}


def service_spec(name: str, wanted: Service | Mapping[str, Any]) -> ServiceSpec:
    """Checks a service and returns it as the scheduler sees it, with its backend's options.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    check_name("service", name)
    service = wanted if isinstance(wanted, Service) else _checked(name, wanted)
    if isinstance(service, EngineService):
        service = service.model_copy(update={"degrees": (len(service.gpus),)})
    if sorted(set(service.degrees)) != list(service.degrees) or not set(
            service.degrees) <= set(BLOCK_SIZES):
        raise InvalidInput(f"service {name}: degrees: {service.degrees} must ascend and be among "
                           f"{', '.join(map(str, BLOCK_SIZES))}")
    try:
        weights, shares = service.weights(), service.shares()
        options = service.model_dump_json().encode()
    except OSError as error:  # as for a link to a file that was removed
        raise InvalidInput(f"service {name}: model: {error.filename!r:.200} cannot be read: "
                           f"{error.strerror}") from None
    except ValueError:
        raise InvalidInput(f"service {name}: one of its texts is not UTF-8") from None
    return ServiceSpec(
        name, round(service.restore_s * 1e9), weights,
        backend=getattr(service, "backend", ""), options=options,
        degrees=service.degrees, batch=service.batch, stay_ns=round(service.stay_s * 1e9),
        shares=shares, node=getattr(service, "node", ""),
        gpus=getattr(service, "gpus", ()))


def options_of(spec: ServiceSpec) -> Any:
    """Returns the options of a service's backend, as an instance of that backend's class.

    Raises:
        InvalidInput: another version of this package wrote them.
    """
    try:
        return _KINDS[spec.backend].model_validate_json(spec.options)
    except (KeyError, ValidationError) as error:
        raise InvalidInput(f"service {spec.name}: its options are not understood, another version "
                           f"wrote them ({error})") from None


def _checked(name: str, wanted: Mapping[str, Any]) -> Service:
    if not isinstance(wanted, Mapping):
        raise InvalidInput(f"service {name}: {wanted!r:.60} is not a table of fields")
    kind = wanted.get("backend", "")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidInput(f"service {name}: backend: {kind!r} is not one of {', '.join(_KINDS)}")
    for field in wanted:
        if not isinstance(field, str):
            raise InvalidInput(f"service {name}: {field!r:.60} is no name of a field")
    try:
        return _KINDS[kind](**wanted)
    except ValidationError as error:
        # a URL can hold a secret
        said = describe_first_error(error, _KINDS[kind], show_value=False)
        raise InvalidInput(f"service {name}: {said}") from None
