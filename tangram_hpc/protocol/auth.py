"""Both sides prove that they hold the same key of the job before any frame is read. Pure.

A job has one key for its clients and another one for its workers. The broker tries both on a peer's
proof, and so knows which of the two the peer is. No key ever travels. Each proof covers both
nonces, the job and the side that proves ("peer" or "broker"), so that neither proof can be replayed
or reflected. HMAC-SHA256 (RFC 2104).

    broker -> peer    16 B magic+version, 32 B nonce
    peer   -> broker  32 B nonce, 32 B proof("peer")
    broker -> peer    32 B proof("broker")          (or the connection ends)
"""

from __future__ import annotations

import hashlib
import hmac

MAGIC = b"tangram-hpc/1\0\0\0"
NONCE = 32
PROOF = 32
GREETING = len(MAGIC) + NONCE
ANSWER = NONCE + PROOF
CLIENT, WORKER = "client", "worker"  # what a peer may be, by the key that it proves


def proof(key: bytes, role: str, broker_nonce: bytes, peer_nonce: bytes, job: str) -> bytes:
    """Returns what the side in `role` ("peer" or "broker") sends to prove that it holds `key`."""
    text = b"\0".join([MAGIC, role.encode(), job.encode()]) + broker_nonce + peer_nonce
    return hmac.new(key, text, hashlib.sha256).digest()


def proven(given: bytes, key: bytes, role: str, broker_nonce: bytes, peer_nonce: bytes,
           job: str) -> bool:
    """Whether `given` is the proof of the side in `role`; compared in constant time."""
    return hmac.compare_digest(given, proof(key, role, broker_nonce, peer_nonce, job))
