"""One Hugging Face model of a copy: loads it from a folder, moves its weights, and answers
requests.

How far answers repeat: a batch of the same requests in the same order gives the same bits on the
same kind of device with the same number of threads, before and after any number of parks, and in
every copy. Beside other requests a request is padded and summed differently, and its answer agrees
to rounding.

This module uses no network and never runs code that lies beside a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from ...protocol import service_frames as frames
from ...protocol.value import encode_value
from .torch_fresh import newest
from .torch_meter import TensorMemoryMeter
from .torch_methods import METHODS, BatchRow, ForwardPass, Method
from .torch_request import InvalidRequest, Reader
from .torch_weights import Weights, release

# most memory, MiB, that a copy may take of its GPU or of the CPU slot that stands in for one
DEVICE_MIB = "TANGRAM_DEVICE_MIB"
_FACTORIES = {"causal": transformers.AutoModelForCausalLM,
              "classifier": transformers.AutoModelForSequenceClassification}


class Unservable(Exception):
    """Raised when a model can never be served as it is declared.

    The text is one line that names the field and the remedy.
    """


class NoDeviceMemory(Exception):
    """Raised when the weights or a batch do not fit onto the device; the model is as it was before.
    """


class Model:
    """A model, which is loaded and parked when the constructor returns.

    Args:
        order: Names the model's folder, its task and dtype, and the kind of device.

    Attributes:
        host_mib: Host memory that the model takes, pages of mapped files included, MiB.

    Raises:
        Unservable: There is no such model, or the model does not fit the declared task.
    """

    def __init__(self, order: frames.LoadModel) -> None:
        torch.set_num_threads(order.threads)
        self._device = _device(order.device)
        self._meter = _meter(order.device)
        folder = Path(order.model)
        module, tokenizer = _open(folder, order)
        self._fresh = Path(order.fresh) if order.fresh else None
        self._weights = Weights(module, folder, self._device, mapped=self._fresh is None)
        self.host_mib = -(-self._weights.host_bytes >> 20)
        _limit(self._device)
        _use_attention_without_plans()
        engine = self._engine = ForwardPass(module, tokenizer, self._device)
        reader = Reader(tokenizer, module.get_input_embeddings().num_embeddings,
                        _longest(module.config, order.max_len))
        self._methods: dict[str, Method] = {
            name: method(engine, reader) for name, method in METHODS[order.task].items()}

    def wake(self, number: int) -> None:
        """Brings the weights onto the device of this number.

        Raises:
            NoDeviceMemory: The weights do not fit; the model is parked as before.
        """
        if self._device.type == "cuda":
            self._device = self._engine.device = torch.device("cuda", number)
        with self._on_device():
            self._weights.wake(self._device)

    def stand_by(self) -> None:
        """Frees what calls have left on the device; the weights stay."""
        release(self._device)

    def park(self) -> None:
        """Moves the weights off the device."""
        self._weights.park()

    def call(self, requests: Sequence[tuple[str, bytes]]) -> list[tuple[bytes, str]]:
        """Returns for each request its encoded value, or why the request is invalid.

        All requests of one method run as one batch.

        Raises:
            NoDeviceMemory: The batch does not fit.
        """
        assert self._weights.awake, "it is called on its device only"
        replies: list[tuple[bytes, str]] = [(b"", "")] * len(requests)
        if why := self._renew():
            return [(b"", why)] * len(requests)
        asked: dict[str, list[tuple[int, list[BatchRow]]]] = {}
        for i, (name, arguments) in enumerate(requests):
            try:
                if name not in self._methods:
                    raise InvalidRequest(f"method: {name!r} is not one of "
                                         f"{', '.join(self._methods)}")
                rows = self._methods[name].read(arguments)
                asked.setdefault(name, []).append((i, rows))
            except InvalidRequest as error:
                replies[i] = (b"", str(error))
        with self._on_device(), torch.inference_mode():
            for name, batch in asked.items():
                method = self._methods[name]
                answers = iter(method.run([each for _, rows in batch for each in rows]))
                for i, rows in batch:
                    replies[i] = (encode_value([next(answers) for _ in rows]), "")
        return replies

    def _renew(self) -> str:
        """Takes up the newest weights, if any were published; returns what is wrong with them, or
        nothing.

        The weights in use stay until the new ones are in place.
        """
        found = newest(self._fresh, self._engine.version) if self._fresh is not None else None
        if found is None:
            return ""
        version, weights = found
        try:
            self._weights.replace(weights)
        except ValueError as error:
            return f"fresh: version {version} in {self._fresh}: {error}"
        self._engine.version = version
        return ""

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        message = ""
        try:
            with ExitStack() as stack:
                if self._meter is not None:
                    stack.enter_context(self._meter)
                yield
        except torch.OutOfMemoryError as error:
            message = str(error).split("\n")[0]
        if message:  # raised outside of `except`: the frames of the caught error keep tensors alive
            release(self._device)
            raise NoDeviceMemory(message)


def _device(kind: str) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unservable("backend: torch finds no CUDA device in its environment; "
                         "install a build of torch for this node's driver")
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def _meter(kind: str) -> TensorMemoryMeter | None:
    mib = os.environ.get(DEVICE_MIB, "")
    return TensorMemoryMeter(int(mib) << 20) if kind == "cpu" and mib else None


def _limit(device: torch.device) -> None:
    """Lets torch take no more of each GPU than it may."""
    mib = os.environ.get(DEVICE_MIB, "")
    for number in range(torch.cuda.device_count() if device.type == "cuda" and mib else 0):
        whole = torch.cuda.get_device_properties(number).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (int(mib) << 20) / whole), number)


def _use_attention_without_plans() -> None:
    """Keeps torch from the attention of cuDNN, which it prefers on Hopper GPUs and later ones.

    cuDNN builds a plan for each shape of a batch that a process meets for the first time, about
    half a second each, and the lengths of texts hardly ever repeat.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _longest(config: Any, wanted: int) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(wanted, own) if isinstance(own, int) and own > 0 else wanted


def _open(folder: Path, order: frames.LoadModel) -> tuple[Any, Any]:
    """Returns the model on the host, and its tokenizer."""
    if not (folder / "config.json").is_file():
        raise Unservable(f"model: {folder} is no folder with a config.json on this node")
    if not any(folder.glob("*.safetensors")):
        raise Unservable(f"model: {folder} holds no *.safetensors; convert its weights")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        module, info = _FACTORIES[order.task].from_pretrained(
            folder, dtype=getattr(torch, order.dtype), use_safetensors=True,
            output_loading_info=True, **local)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        first = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise Unservable(f"model: {folder} cannot be loaded as a {order.task}: {first}") from None
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise missing weights at random
        raise Unservable(f"task: {folder} has no weights {', '.join(missing[:3])} that a "
                         f"{order.task} needs")
    if order.task == "classifier" and module.config.num_labels != 1:
        raise Unservable(f"model: {folder} has {module.config.num_labels} labels; `score` "
                         "needs a model with one")
    return module.eval().requires_grad_(False), tokenizer
