"""Tokens of shared sessions: what is told to other clients, and what the broker remembers. Pure.

The client that opens a shared session draws one secret. From it follow two tokens: whoever knows
the *attach token* may use the session, and whoever knows the *close token* may also close it and
hold it open. The close token is the secret itself. The attach token is a keyed hash of it, so that
nobody can compute the close token from the attach token.

The broker is told only a hash of each token when the session is opened, and only these hashes are
in the journal. A token has 192 random bits, so a plain hash of it cannot be inverted by guessing.
"""

from __future__ import annotations

import hashlib
import hmac

TOKEN_MAX = 200  # characters that are accepted where a token is expected


def attach_token(secret: str) -> str:
    """Returns the attach token of the session with this secret."""
    return hmac.new(secret.encode(), b"attach", hashlib.sha256).hexdigest()


def hash_of(token: str) -> str:
    """Returns what the broker and the journal remember of a token."""
    return hashlib.sha256(b"tangram-session:" + token.encode("utf-8", "surrogatepass")).hexdigest()


def same(one: str, other: str) -> bool:
    """Returns whether two hashes are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
