"""Pure. What an HTTP answer, or the failure to get one, says about calling again.

Law: goes by shape and name only, so no HTTP library is imported: anything with `status_code` or
`status` and `headers` is a response, as of httpx, requests and aiohttp. What is not understood is
left as it is, and then never repeated.
"""

from __future__ import annotations

import socket
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from ...errors import Throttled, Transient

_Response = TypeVar("_Response")
# failures before a request has left: of httpx, aiohttp, requests/urllib3
_UNREACHED = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "ClientConnectorError",
                        "ConnectionTimeoutError", "NewConnectionError", "ConnectTimeoutError"})
_BROKEN = frozenset({"TransportError", "ServerDisconnectedError", "ClientOSError",
                     "ClientPayloadError", "ChunkedEncodingError", "ProtocolError"})


def check_response(response: _Response, now: datetime | None = None) -> _Response:
    """The response itself, unless its status is 429 or 5xx.

    Raises:
        Throttled: 429; with what `Retry-After` says (seconds or an HTTP date).
        Transient: 5xx; it may have been carried out.
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
    """Seconds that a `Retry-After` header asks to wait; 0 when it says nothing that is known."""
    text = text.strip()
    try:
        return max(0.0, float(text)) if text[:1].isdigit() else _until(text, now)
    except (ValueError, TypeError, IndexError):
        return 0.0


def _until(text: str, now: datetime | None) -> float:
    when = parsedate_to_datetime(text)
    when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - (now or datetime.now(timezone.utc))).total_seconds())


def understood(error: BaseException) -> Throttled | Transient | None:
    """What an attempt's exception says about calling again; None for nothing: it is the caller's
    own. A connection that never stood was not reached, one that broke may have been."""
    if isinstance(error, Throttled | Transient):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionRefusedError | socket.gaierror) or names & _UNREACHED:
        return Transient(text, reached=False)
    if isinstance(error, ConnectionError | EOFError) or names & _BROKEN:
        return Transient(text)
    return None
