"""Encodes a function's result as msgpack and raw array buffers, without pickle. Pure.

Decoding builds only the types listed here, whatever the bytes say: None, bool, int, float, str,
bytes, list, tuple, dict, and numpy arrays and scalars of plain dtypes. numpy is imported only when
an array is met.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec

from .reading import reader

_TUPLE, _ARRAY, _SCALAR, _BIG = 1, 2, 3, 4
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_DTYPE = re.compile(r"[<>|=][biufcSUVmM?]\d*(\[\w+\])?")
_Ext = msgspec.msgpack.Ext
_encoder = msgspec.msgpack.Encoder()


def encode_value(value: Any) -> bytes:
    """Returns the bytes of a value.

    Raises:
        TypeError: the value holds something that cannot travel like this; the text names its type.
    """
    try:
        return _encoder.encode(_portable(value))
    except RecursionError:
        raise TypeError(f"{type(value).__name__} that is nested too deep") from None
    except UnicodeEncodeError:
        raise TypeError("str that is not UTF-8") from None


def decode_value(data: bytes | bytearray | memoryview) -> Any:
    """Returns the value in these bytes. Arrays are writable and own their memory.

    Raises:
        msgspec.DecodeError: the bytes are not a value.
    """
    return _read(data)


def _portable(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and not -(1 << 63) <= value < 1 << 64:
            return _Ext(_BIG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        return value
    if kind is list:
        return [_portable(item) for item in value]
    if kind is tuple:
        return _Ext(_TUPLE, _encoder.encode([_portable(item) for item in value]))
    if kind is dict:
        return {_key(name): _portable(item) for name, item in value.items()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _array(numpy, value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))


def _key(name: Any) -> Any:
    if type(name) in (str, bytes, float) or (type(name) is int and -(1 << 63) <= name < 1 << 64):
        return name
    if type(name) in (bool, type(None)):
        return name
    raise TypeError(f"dict with a key of type {type(name).__name__}")


def _array(numpy: Any, value: Any) -> Any:
    """Returns an array or scalar as an extension.

    Its bytes are: one byte with the length of the head, the head (dtype and shape), the raw buffer.
    """
    array = numpy.asarray(value)
    exact = type(value) is numpy.ndarray or isinstance(value, numpy.generic)
    if not exact or array.dtype.names or not _DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} "
                        f"of dtype {array.dtype}")
    head = _encoder.encode((array.dtype.str, array.shape))
    code = _ARRAY if type(value) is numpy.ndarray else _SCALAR
    return _Ext(code, bytes((len(head),)) + head + array.tobytes())


def _open(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(_read_list(data))
    if code == _BIG:
        return int.from_bytes(data, "little", signed=True)
    if code in (_ARRAY, _SCALAR):
        import numpy

        split = 1 + data[0]
        name, shape = _read_head(data[1:split])
        if not _DTYPE.fullmatch(name):
            raise ValueError(f"an array of dtype {name!r}")
        array = numpy.frombuffer(bytearray(data[split:]), numpy.dtype(name)).reshape(shape)
        return array if code == _ARRAY else array[()]
    raise ValueError(f"an extension of code {code}")


_read = reader(Any, _open)
_read_list = reader(list, _open)
_read_head = reader(tuple[str, tuple[int, ...]])
