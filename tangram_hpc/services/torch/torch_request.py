"""Reads one request of a torch model: checks its fields and turns text into tokens.

Nothing is computed here. An error concerns one request alone and is one line that names the field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...protocol.value import decode_value


class InvalidRequest(Exception):
    """Raised when one request cannot be answered; its text says why in one line."""


class Reader:
    """Reads the fields and tokens of requests to one model.

    Args:
        tokenizer: The model's own tokenizer.
        vocabulary: How many tokens the model knows.
        longest: The longest sequence that the model takes, tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, longest: int) -> None:
        self._tokenizer, self._vocabulary, self._longest = tokenizer, vocabulary, longest

    def fields(self, arguments: bytes, needed: tuple[str, ...],
               optional: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns the fields of a request.

        Args:
            arguments: The encoded request.
            needed: Names that must be there.
            optional: Further names that may be there.

        Raises:
            InvalidRequest: The request is no dict, or lacks a field, or has an unknown one.
        """
        try:
            given = decode_value(arguments)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"arguments: not a value ({error})") from None
        if not isinstance(given, dict):
            raise InvalidRequest(f"arguments: a {type(given).__name__}, not a dict of "
                                 f"{', '.join(needed)}")
        for name in needed:
            if name not in given:
                raise InvalidRequest(f"{name}: is missing")
        for name in given:
            if name not in needed + optional:
                said = name[:40] if isinstance(name, str) else f"a {type(name).__name__}"
                raise InvalidRequest(f"{said}: is not one of {', '.join(needed + optional)}")
        return given

    def sequences(self, fields: dict[str, Any], name: str, special: bool = True
                  ) -> list[list[int]]:
        """Returns the tokens of each text of a field.

        A text is a str, or a list of token ids, to which nothing is added.

        Args:
            fields: The fields of a request.
            name: The field to read.
            special: Whether the tokenizer adds its special tokens to a str.

        Raises:
            InvalidRequest: The field is no list of texts, or a text is empty or has unknown tokens.
        """
        texts = fields[name]
        if not isinstance(texts, (list, tuple)) or not texts:
            raise InvalidRequest(f"{name}: must be a list of texts, and not empty")
        return [self._tokens(f"{name}[{i}]", text, special) for i, text in enumerate(texts)]

    def _tokens(self, name: str, text: Any, special: bool) -> list[int]:
        if isinstance(text, str):
            tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        elif isinstance(text, (list, tuple)) and all(type(token) is int for token in text):
            tokens = list(text)
        else:
            raise InvalidRequest(f"{name}: a {type(text).__name__}, not a str or a list of tokens "
                                 "(int)")
        if not tokens:
            raise InvalidRequest(f"{name}: has no token")
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise InvalidRequest(f"{name}: has token ids outside the model's 0 to "
                                 f"{self._vocabulary - 1}")
        return tokens

    def fits(self, name: str, tokens: int) -> None:
        """Raises InvalidRequest if a sequence of this many tokens is too long for the model."""
        if tokens > self._longest:
            raise InvalidRequest(f"{name}: {tokens} tokens; the model takes at most "
                                 f"{self._longest}")
