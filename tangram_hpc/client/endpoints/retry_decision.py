"""The retry decision: whether an HTTP answer or an exception allows the call to be repeated.

No HTTP library is imported, and no I/O is done. An object with `status_code` or `status`, and
`headers`, is a response, as in httpx, requests and aiohttp; exceptions are recognised by the names
of their classes. Other values and exceptions are passed on as they are, and the call is then not
repeated.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from ...errors import Throttled, Transient, described

_Response = TypeVar("_Response")
# failures before a request was sent: classes of httpx, aiohttp, requests and urllib3
_UNREACHED = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "ClientConnectorError",
                        "ConnectionTimeoutError", "NewConnectionError", "ConnectTimeoutError"})
# failures after that: a broken connection, or no answer within the library's own time limit
_BROKEN = frozenset({"TransportError", "ServerDisconnectedError", "ServerTimeoutError",
                     "ClientOSError", "ClientPayloadError", "ChunkedEncodingError", "ReadTimeout",
                     "ReadTimeoutError", "ProtocolError"})
_WRAPPERS = frozenset({"MaxRetryError"})


def check_response(response: _Response, now: datetime | None = None) -> _Response:
    """Returns a response unless its status is 429 or 5xx.

    Args:
        response: a response of httpx, requests or aiohttp, or any object with `status_code` or
            `status`, and `headers`.
        now: the current time, for a `Retry-After` that is a date; None for the clock's.

    Returns:
        The response itself.

    Raises:
        Throttled: the status is 429. `retry_after` holds what `Retry-After` says, in seconds.
        Transient: the status is 5xx; the endpoint may have carried the call out.

    Example:
        async def attempt():
            return tangram_hpc.check_response(await http.get(url)).json()
    """
    told: Any = response
    status: int = getattr(told, "status_code", 0) or getattr(told, "status", 0)
    if status != 429 and not 500 <= status < 600:
        return response
    headers = {str(name).lower(): value for name, value in dict(told.headers).items()}
    wait_s = retry_after_s(str(headers.get("retry-after", "")), now)
    if status == 429:
        raise Throttled(wait_s, "429 too many requests")
    raise Transient(f"the endpoint answered {status}", retry_after=wait_s)


def retry_after_s(text: str, now: datetime | None = None) -> float:
    """The seconds that a `Retry-After` header (a number or an HTTP date) asks to wait; 0 where it
    is neither."""
    text = text.strip()
    try:
        return max(0.0, float(text)) if text[:1].isdigit() else _until(text, now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


def _until(text: str, now: datetime | None) -> float:
    when = parsedate_to_datetime(text)
    when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - (now or datetime.now(timezone.utc))).total_seconds())


def understood(error: BaseException) -> Throttled | Transient | None:
    """Translates an attempt's exception.

    Returns:
        Throttled or Transient, if the exception tells whether the call may be repeated: without a
        connection the call did not reach the endpoint; if the connection broke, or no answer came
        within the HTTP library's time limit, it may have. None for any other exception, which is
        the caller's own.
    """
    if isinstance(error, Throttled | Transient):
        return error
    for inner in _with_wrapped(error):
        names = {kind.__name__ for kind in type(inner).__mro__}
        if isinstance(inner, ConnectionRefusedError | socket.gaierror) or names & _UNREACHED:
            return Transient(described(error), reached=False)
        if isinstance(inner, ConnectionError | EOFError) or names & _BROKEN:
            return Transient(described(error))
    return None


def _with_wrapped(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception and those that it wraps, the outermost first. requests and urllib raise
    an OSError of their own, and urllib3 a MaxRetryError, with the failure of the connection as its
    `reason` or among its arguments.
    """
    yield error
    if not isinstance(error, OSError) and type(error).__name__ not in _WRAPPERS:
        return
    for inner in (getattr(error, "reason", None), *error.args):
        if isinstance(inner, BaseException):
            yield from _with_wrapped(inner)
