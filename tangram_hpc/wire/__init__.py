"""Bytes only: messages, frames and the handshake as pure functions of bytes. No sockets here."""
