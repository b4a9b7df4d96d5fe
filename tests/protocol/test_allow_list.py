"""Allow-lists: what an entry gives access to, and what no entry does, in every notation."""

from __future__ import annotations

import ipaddress

import pytest

from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol.allow_list import (
    ENTRIES_MAX,
    AllowList,
    checked_entries,
    is_public,
    literal,
)

ADDRESS = ipaddress.ip_address


@pytest.mark.parametrize(("entry", "host", "port", "reached"), [
    ("example.org", "example.org", 443, True), ("example.org", "Example.org.", 80, True),
    ("example.org", "example.org", 22, False),
    ("example.org", "evil-example.org", 443, False),
    ("example.org", "www.example.org", 443, False),
    ("example.org", "example.org.evil.net", 443, False),
    ("example.org:8443", "example.org", 8443, True),
    ("example.org:8443", "example.org", 443, False),
    ("example.org:*", "example.org", 5, True), ("*.example.org", "files.example.org", 443, True),
    ("*.example.org", "example.org", 443, False), ("*.example.org", "xexample.org", 443, False),
    ("*", "any.thing", 80, True), ("*", "any.thing", 81, False), ("*:*", "any.thing", 81, True),
    ("*:*", "2130706433", 80, False), ("*:*", "0x7f.1", 80, False), ("*:*", "127.1", 80, False),
    ("*:*", "10.0.0.1", 80, False), ("*:*", "0x7f000001", 80, False), ("*:*", "", 80, False),
    ("*:*", "a b", 80, False), ("*:*", "::1", 80, False), ("10.0.0.1", "10.0.0.1", 80, False)])
def test_a_name_reaches_what_it_says(entry: str, host: str, port: int, reached: bool) -> None:
    assert AllowList([entry]).names(host, port) is reached


@pytest.mark.parametrize(("entry", "address", "port", "listed"), [
    ("10.1.2.3", "10.1.2.3", 80, True), ("10.1.2.3", "10.1.2.4", 80, False),
    ("10.1.2.3:8080", "10.1.2.3", 8080, True), ("10.1.0.0/16", "10.1.255.1", 443, True),
    ("10.1.0.0/16:*", "10.1.255.1", 1, True), ("10.1.0.0/16", "10.2.0.1", 443, False),
    ("[::1]:80", "::1", 80, True), ("::1", "::1", 443, True), ("[::1]", "::1", 443, True),
    ("127.0.0.1", "::ffff:127.0.0.1", 80, True), ("*:*", "127.0.0.1", 80, False),
    ("localhost", "127.0.0.1", 80, False)])
def test_an_address_is_reached_if_it_is_listed_itself(entry: str, address: str, port: int,
                                                      listed: bool) -> None:
    assert AllowList([entry]).lists(ADDRESS(address), port) is listed


@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1",
    "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "192.0.2.1", "198.18.0.1"])
def test_what_is_not_of_the_public_internet(address: str) -> None:
    assert not is_public(ADDRESS(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "151.101.0.223", "2606:4700::1111",
                                     "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_what_is_of_the_public_internet(address: str) -> None:
    assert is_public(ADDRESS(address))


@pytest.mark.parametrize("wrong", [
    "", "http://example.org", "example.org/simple", "example.org:0", "a b", "example.org:65536",
    "example.org:http", "*example.org", "a.*.org", 7, "2130706433", "127.1", "x" * 301, "-a.org",
    "a..b", "[::1", ":80", "10.0.0.0/33", None])
def test_what_is_no_entry_is_refused_with_its_name(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="network: ") as error:
        checked_entries(["example.org", wrong])  # type: ignore[list-item]
    assert "\n" not in str(error.value)


def test_a_list_has_bounds() -> None:
    for wrong in ([], ["a.org"] * (ENTRIES_MAX + 1)):
        with pytest.raises(InvalidInput, match=f"1 to {ENTRIES_MAX} entries"):
            checked_entries(wrong)
    assert checked_entries(name for name in ("a.org", "*.B.org:*")) == ("a.org", "*.B.org:*")


def test_only_numbers_in_their_plain_form_are_addresses() -> None:
    assert literal("[::1]") == ADDRESS("::1") and literal("::ffff:1.2.3.4") == ADDRESS("1.2.3.4")
    assert [literal(text) for text in ("127.1", "0x7f000001", "localhost", "")] == [None] * 4
