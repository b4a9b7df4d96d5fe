"""Reads `multipart/form-data` bodies, as clients of the E2B wire upload files. Pure.

Starlette's own reader needs one more package and writes each part to a file first. Neither is
needed here, because the guard of the server has already read the whole body and checked its size.
"""

from __future__ import annotations

import itertools
import re
from urllib.parse import unquote

from .wire_errors import ApiError

PARTS_MAX = 1024
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def read_files(content_type: str, body: bytes | bytearray) -> list[tuple[str, memoryview]]:
    """Returns the file name and the content of each part with the field name `file`. The contents
    are views of the body, since a copy of it may have 512 MiB. The search for their ends may take a
    second; call it in a thread.

    Args:
        content_type: the request's Content-Type.
        body: the whole body.

    Raises:
        ApiError: the body is not of this Content-Type, or is cut off.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ApiError(400, "Content-Type: multipart/form-data needs a boundary")
    mark = b"--" + (found[1] or found[2]).encode("latin-1", errors="replace")
    if not body.startswith(mark):
        raise ApiError(400, "the body does not begin with its boundary")
    starts, end_mark = [len(mark)], b"\r\n" + mark
    while (end := body.find(end_mark, starts[-1])) >= 0:
        if len(starts) > PARTS_MAX:  # a small compressed body can have millions
            raise ApiError(400, f"the body has more than {PARTS_MAX} parts")
        starts.append(end + len(end_mark))
    if not body.startswith(b"--", starts[-1]):
        raise ApiError(400, "the body ends before its last boundary")
    whole, files = memoryview(body), []
    for start, following in itertools.pairwise(starts):
        end = following - len(end_mark)
        gap = body.find(b"\r\n\r\n", start, end)
        if gap <= start or not body.startswith(b"\r\n", start):
            raise ApiError(400, "a part of the body has no headers")
        names = _names(bytes(whole[start:gap]))
        if names.get("name") == "file":
            files.append((names.get("filename", ""), whole[gap + 4:end]))
    return files


def _names(head: bytes) -> dict[str, str]:
    """Returns the parameters of a part's Content-Disposition. Clients write quotes and line ends in
    a file name as %22, %0D and %0A."""
    for line in head.decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            return {key.lower(): re.sub(r"%(?:22|0D|0A)", lambda m: unquote(m[0]),
                                        re.sub(r"\\(.)", r"\1", text))
                    for key, text in _PARAMETER.findall(value)}
    return {}
