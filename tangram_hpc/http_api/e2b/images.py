"""Decides which image, CPUs and memory a client's sandbox gets.

A client names a *template*, and may ask for more in the sandbox's metadata. It gets only what the
options of the server allow: templates by name, and images that match a pattern. By default there is
one template, `base`, and clients can name no image.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ... import InvalidInput
from .wire_errors import ApiError

# the templates that clients name when their user names none: those of the packages e2b and
# e2b-code-interpreter
BASE, CODE = "base", "code-interpreter-v1"
_TAG = ":default"
_CPUS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_MEMORY = re.compile(r"\d{1,9}[MG]?")


@dataclass(frozen=True)
class E2bOptions:
    """The options of `tangram serve http` for the E2B wire.

    Attributes:
        templates: the image of each template, by the template's name; an empty image is the node's
            own file system.
        images: shell patterns of the images that clients may name themselves.
        image_key: the key of a sandbox's metadata that names its image.
        network: whether sandboxes have the node's network, unless their client declines it.
        longest_s: the longest time that a sandbox may live, in seconds.
    """

    templates: Mapping[str, str] = field(default_factory=lambda: {BASE: ""})
    images: Sequence[str] = ()
    image_key: str = "image"
    network: bool = False
    longest_s: int = 24 * 3600

    def image_of(self, template: str) -> str | None:
        """Returns the image of a template that the server offers, else None. A client may name the
        template with E2B's default tag, `NAME:default`."""
        image = self.templates.get(template)
        return self.templates.get(template.removesuffix(_TAG)) if image is None else image


def read_options(image: str, templates: Sequence[str], images: Sequence[str], image_key: str,
                 network: bool, longest_s: int) -> E2bOptions:
    """Returns the options of a command line.

    Args:
        image: the image of the template `base`.
        templates: the further templates, each as `NAME=IMAGE`.
        images, image_key, network, longest_s: as in `E2bOptions`.

    Raises:
        InvalidInput: an option is wrong; the message names it.
    """
    known = {BASE: image, CODE: image}
    for text in templates:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[\w./:-]{1,128}", name):
            raise InvalidInput(f"--e2b-template: {text!r:.80} is not NAME=IMAGE")
        known[name] = value
    if longest_s < 1:
        raise InvalidInput(f"--e2b-longest: {longest_s} is not a positive number of seconds")
    return E2bOptions(known, tuple(images), image_key, network, longest_s)


@dataclass(frozen=True)
class Wanted:
    """The image and resources of one sandbox.

    Attributes:
        template: the template's name, as the client gave it.
        image: its image; empty for the node's own file system.
        cpus: the fewest and the most CPUs of each of its commands.
        memory: the memory in the form of `Client.session(mem=)`; 0 for no bound of its own.
    """

    template: str
    image: str
    cpus: tuple[int, int] = (1, 1)
    memory: int | str = 0


def wanted(options: E2bOptions, template: str, metadata: Mapping[str, str]) -> Wanted:
    """Returns the image and resources of a sandbox.

    Args:
        options: what the server allows.
        template: the template that the client named.
        metadata: the sandbox's metadata. `cpus` ("2" or "1-8"), `memory` ("512M", "2G") and the
            key that `options.image_key` names are read; all other keys are kept for the client.

    Raises:
        ApiError: the template or image may not be used, or a value is wrong.
    """
    offered = options.image_of(template)
    image = metadata.get(options.image_key) or offered
    if image is None:
        image = template
    if image != offered and not _is_offered(image, options.images):
        raise ApiError(404, f"template {image!r:.120} not found: this server offers "
                            f"{', '.join(sorted(options.templates))}; start it with --e2b-template "
                            "or --e2b-images to offer more")
    return Wanted(template, image, _cpus(metadata.get("cpus", "1")),
                  _memory(metadata.get("memory", "")))


def _is_offered(image: str, patterns: Sequence[str]) -> bool:
    """Returns whether an image that a client named matches a pattern. A folder or a file must match
    by its real path too, so that neither `..` nor a link leads to another one."""
    if ".." in re.split("[/:]", image):
        return False
    start = image.find("/")
    local = image.startswith("/") or (image[:start].endswith(":") and "//" not in image)
    real = image[:start] + os.path.realpath(image[start:]) if local else image
    return any(fnmatch.fnmatchcase(image, pattern) and fnmatch.fnmatchcase(
        real, _resolved(pattern) if local else pattern) for pattern in patterns)


def _resolved(pattern: str) -> str:
    """Returns a pattern of paths with the real path of the folder before its first wildcard."""
    plain = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    start, end = pattern.find("/"), plain.rfind("/")
    if not 0 <= start < end:
        return pattern
    return pattern[:start] + os.path.realpath(pattern[start:end]) + pattern[end:]


def _cpus(text: str) -> tuple[int, int]:
    found = _CPUS.fullmatch(text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high:
        raise ApiError(400, f"metadata cpus: {text!r:.20} is neither a number of CPUs nor a range "
                            "such as 1-8")
    return low, high


def _memory(text: str) -> int | str:
    if text and not _MEMORY.fullmatch(text):
        raise ApiError(400, f"metadata memory: {text!r:.20} is not an amount such as 512M or 2G")
    return text or 0
