"""Frames, payloads and the challenge: messages survive encoding, and wrong input is an error."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tangram_hpc.domain.action import Action, Profile
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ProtocolError
from tangram_hpc.protocol import auth
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import payload as pl
from tangram_hpc.protocol.frame import Inbox, Outbox
from tangram_hpc.protocol.value import decode_value, encode_value


def frame(*envelopes: tuple[ms.Message, bytes | None]) -> bytes:
    outbox = Outbox()
    for message, payload in envelopes:
        outbox.put(message, payload)
    return b"".join(outbox.take())


def test_any_split_of_the_stream_gives_the_same_messages() -> None:
    rng = random.Random(7)
    sizes = [0, 3, 70_000]
    sent = [(ms.Submit(Action(i + 1, "x", degrees=(1, 2))), rng.randbytes(rng.choice(sizes)))
            if rng.random() < .5 else (ms.Ping(i), None) for i in range(60)]
    stream = b"".join(frame(*sent[i : i + 7]) for i in range(0, len(sent), 7))
    for size in (1, 5, 4096, 65536, len(stream)):
        if size == 1 and len(stream) > 200_000:
            cuts = [*range(3000), *range(3000, len(stream), 9999)]
        else:
            cuts = list(range(0, len(stream), size))
        inbox, got = Inbox(), []
        for a, b in zip(cuts, [*cuts[1:], len(stream)], strict=True):
            got += [(m, None if p is None else bytes(p)) for m, p in inbox.feed(stream[a:b])]
        assert got == sent


def test_an_empty_payload_is_no_buffer_of_its_own() -> None:
    """A gathering write that ends with an empty buffer sends 0 bytes for ever."""
    outbox = Outbox()
    outbox.put(ms.Submit(Action(1, "x")), b"x" * 4096)
    outbox.put(ms.Submit(Action(2, "x")), b"")
    buffers = outbox.take()
    assert all(buffers) and len(buffers) > 1
    assert [bytes(data or b"") for _, data in Inbox().feed(b"".join(buffers))] == [b"x" * 4096, b""]


def test_an_empty_outbox_gives_nothing_and_payloads_are_not_copied() -> None:
    outbox = Outbox()
    assert outbox.take() == []
    data = bytearray(1000)
    outbox.put(ms.Submit(Action(1, "x")), data)
    assert outbox.take()[1] is data


@pytest.mark.parametrize("bad", [b"\xff" * 64, frame((ms.Ping(1), None))[:8] + b"\xc1" * 8])
def test_an_unreadable_frame_is_a_protocol_error(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Inbox().feed(bad))


def test_a_missing_payload_is_a_protocol_error() -> None:
    outbox = Outbox()
    outbox.put(ms.Submit(Action(1, "x")), b"abc")
    whole = b"".join(outbox.take())
    cut = (len(whole) - 3 - 4).to_bytes(4, "little") + whole[4:-3]
    with pytest.raises(ProtocolError, match="payload"):
        list(Inbox().feed(cut))


def test_every_message_field_survives_encoding() -> None:
    action = Action(9, "n", degrees=(1, 4), mem_mib=3, session=8, timeout_ns=5, attempts_max=2,
                    resizable=False, component="gpu", profile=Profile(10, 20))
    result = ms.ActionResult(9, Outcome(ActionState.TIMEOUT, 1, 9, 2, 3, 4, "r", "i", "e"), "n1",
                             (3, 4), 2, 5, 6, 1)
    sent = [(ms.StartAttempt(4, action, (1, 2), (0,)), b"p"), (result, b"q")]
    assert [(m, bytes(p)) for m, p in Inbox().feed(frame(*sent))] == sent  # type: ignore[arg-type]


def test_payloads_round_trip() -> None:
    for payload in (pl.ExecCall(argv=("a", "b"), env={"K": "v"}, files={"f": b"\0"}),
                    pl.FileCall("x", b""), pl.FileCall("x"), pl.FunctionCall("d", b"a", True),
                    pl.ExecReturn(b"o", b"e", (1, 2)), pl.Stored("d", 3),
                    pl.ValueReturn(b"v"), pl.ErrorReturn("K", "t", "r")):
        assert pl.decode(pl.encode(payload)) == payload


def test_values_keep_their_types_and_arrays_their_bits() -> None:
    value = {"a": [1, 2.5, None, True, b"x", "y"], "t": (1, (2,)), 3: {"n": -1}}
    assert decode_value(encode_value(value)) == value
    for array in (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4)), np.array(3)):
        back = decode_value(encode_value([array]))[0]
        assert back.dtype == array.dtype and back.shape == array.shape and (back == array).all()
    with pytest.raises(TypeError, match="object"):
        encode_value(object())


def test_a_proof_is_valid_only_for_its_role_job_and_nonces() -> None:
    key, ours, theirs = b"k" * 32, b"a" * 32, b"b" * 32
    given = auth.proof(key, "peer", ours, theirs, "7")
    assert auth.proven(given, key, "peer", ours, theirs, "7")
    for wrong in ((b"x" * 32, "peer", ours, theirs, "7"), (key, "broker", ours, theirs, "7"),
                  (key, "peer", theirs, ours, "7"), (key, "peer", ours, theirs, "8")):
        assert not auth.proven(given, *wrong)
