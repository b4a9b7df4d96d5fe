"""Keys of HTTP clients: files of keys, and where a key may stand in a request."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from tangram_hpc import InvalidInput
from tangram_hpc.http_api.keys import ClientKeys, new_key, read_keys

KEY = "k" * 16


def keys_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_names_each_client_and_its_key(tmp_path: Path) -> None:
    path = keys_file(tmp_path, f"# two clients\nverl {KEY}\n\nslime {KEY}2  # the second\n")
    assert read_keys(path) == {"verl": KEY, "slime": f"{KEY}2"}


@pytest.mark.parametrize(("text", "mode", "message"), [
    (f"verl {KEY}\n", 0o644, "other users may read"),
    ("verl short\n", 0o600, "line 1: give a name and a key of at least 16"),
    (f"verl {KEY}/x\n", 0o600, "without '/'"),
    (f"verl {KEY} more\n", 0o600, "line 1"),
    (f"verl {KEY}\nverl {KEY}2\n", 0o600, "line 2: the name 'verl' occurs twice"),
    ("# nobody\n", 0o600, "holds no key"),
])
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        read_keys(keys_file(tmp_path, text, mode))
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read_keys(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["", ".", "/dev/null"])
def test_what_is_no_file_is_refused_as_such(name: str) -> None:
    """The remedy for files, `chmod 600`, would lock users out of a folder, or break the device."""
    with pytest.raises(InvalidInput, match="it is neither a file nor a pipe"):
        read_keys(Path(name))


def basic(user: str, key: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()


@pytest.mark.parametrize("headers", [
    {"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"authorization": basic("any", KEY)},
    {"authorization": basic("", KEY)}])
def test_a_key_is_found_in_each_header_that_clients_use(headers: dict[str, str]) -> None:
    assert ClientKeys({"verl": KEY}).from_headers(headers) == "verl"


@pytest.mark.parametrize("headers", [
    {}, {"x-api-key": ""}, {"x-api-key": KEY + " "}, {"authorization": KEY},
    {"authorization": "Basic !!!"}, {"authorization": f"Digest {KEY}"},
    {"authorization": basic(KEY, "")}, {"x-api-key": "wrong", "authorization": f"Bearer {KEY}"}])
def test_no_other_header_lets_a_client_in(headers: dict[str, str]) -> None:
    assert ClientKeys({"verl": KEY}).from_headers(headers) == ""


def test_fresh_keys_differ_and_fit_into_a_url() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    # what E2B's SDK takes before 2.46, on which the package openai-agents is pinned
    assert all(re.fullmatch("e2b_[0-9a-f]{64}", key) for key in keys)
