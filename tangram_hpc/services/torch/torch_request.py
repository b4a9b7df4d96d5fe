"""Owns: reading one request of a model service: its fields, and text into tokens. Must not
compute; whatever is wrong with a request is one line that names the field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...protocol.value import decode_value


class Wrong(Exception):
    """This one request cannot be answered; one line."""


class Reader:
    """Fields and tokens of the requests to one model.

    Args:
        tokenizer: the model's own.
        vocabulary: how many tokens it knows.
        longest: sequence that it takes, tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, longest: int) -> None:
        self._tokenizer, self._vocabulary, self._longest = tokenizer, vocabulary, longest

    def fields(self, arguments: bytes, needed: tuple[str, ...],
               optional: tuple[str, ...] = ()) -> dict[str, Any]:
        """The fields of a request.

        Raises:
            Wrong: it is no dict, or has other fields.
        """
        try:
            given = decode_value(arguments)
        except msgspec.DecodeError as error:
            raise Wrong(f"arguments: not a value ({error})") from None
        if not isinstance(given, dict):
            raise Wrong(f"arguments: a {type(given).__name__}, not a dict of "
                        f"{', '.join(needed)}")
        for name in needed:
            if name not in given:
                raise Wrong(f"{name}: is missing")
        for name in given:
            if name not in needed + optional:
                said = name[:40] if isinstance(name, str) else f"a {type(name).__name__}"
                raise Wrong(f"{said}: is not one of {', '.join(needed + optional)}")
        return given

    def sequences(self, fields: dict[str, Any], name: str, special: bool = True
                  ) -> list[list[int]]:
        """The tokens of each text of a field; a text is a str, or a list of its tokens as numbers,
        to which nothing is added. `special`: with what the tokenizer puts around a text.

        Raises:
            Wrong: it is no list of texts, or one of them is empty or unknown to the model.
        """
        texts = fields[name]
        if not isinstance(texts, (list, tuple)) or not texts:
            raise Wrong(f"{name}: must be a list of texts, and not empty")
        return [self._tokens(f"{name}[{i}]", text, special) for i, text in enumerate(texts)]

    def _tokens(self, name: str, text: Any, special: bool) -> list[int]:
        if isinstance(text, str):
            tokens = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        elif isinstance(text, (list, tuple)) and all(type(token) is int for token in text):
            tokens = list(text)
        else:
            raise Wrong(f"{name}: a {type(text).__name__}, not a str or a list of tokens (int)")
        if not tokens:
            raise Wrong(f"{name}: has no token")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise Wrong(f"{name}: has tokens beyond the model's {self._vocabulary}")
        return tokens

    def fits(self, name: str, tokens: int) -> None:
        """Raises Wrong when a sequence of so many tokens is too long."""
        if tokens > self._longest:
            raise Wrong(f"{name}: {tokens} tokens, and at most {self._longest} are taken")
