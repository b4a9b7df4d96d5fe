"""Which isolation backends a node offers, to whom, and what is told to who can have none."""

from __future__ import annotations

import re

import pytest

from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.sandbox.isolation import landlock, seccomp
from tangram_hpc.sandbox.manager import backends
from tangram_hpc.sandbox.manager.backends import Backends
from tangram_hpc.sandbox.manager.probe import RuntimeReport


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without any of the programs, whose kernel has all."""
    monkeypatch.setattr(backends, "missing", lambda runtime: "not installed")
    monkeypatch.setattr(landlock, "abi", lambda: landlock.ABI_SCOPES)
    monkeypatch.setattr(seccomp, "available", lambda: True)
    monkeypatch.setattr(backends, "is_root", lambda: False)


@pytest.mark.usefixtures("bare")
def test_untrusted_code_gets_process_where_the_kernel_has_landlock_and_seccomp() -> None:
    found = Backends.probed()
    assert found.trusted == found.untrusted == ("process",)
    assert found.box(SessionSpec(1)).backend == "process"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("abi, filters, why", [
    (0, True, "this kernel has no Landlock"),
    (landlock.ABI_SCOPES - 1, True,
     "this kernel's Landlock (older than 6.12) cannot restrict signals"),
    (landlock.ABI_SCOPES, False, "this kernel cannot filter system calls")])
def test_untrusted_code_is_refused_where_the_kernel_lacks_landlock_or_seccomp(
        abi: int, filters: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: abi)
    monkeypatch.setattr(seccomp, "available", lambda: filters)
    found = Backends.probed()
    assert found.untrusted == () and found.why_not["process"] == why
    with pytest.raises(InvalidInput, match=f"^trusted: .*{re.escape(why)}.*say trusted=True"):
        found.box(SessionSpec(1))
    assert found.box(SessionSpec(1, trusted=True)).backend == "process"


@pytest.mark.usefixtures("bare")
def test_a_configured_backend_or_path_that_does_not_work_is_refused() -> None:
    with pytest.raises(InvalidInput, match="config field `isolation`: bwrap cannot be used here"):
        Backends.probed("bwrap")
    with pytest.raises(InvalidInput, match="config field `read_paths`: readable path '/etc'"):
        Backends.probed("", ["/etc"])


def test_a_backend_that_was_not_tried_to_the_end_is_told_apart(
        monkeypatch: pytest.MonkeyPatch) -> None:
    late = RuntimeReport("bwrap was not tried to the end in 120 s", late=True)
    monkeypatch.setattr(backends, "missing",
                        lambda runtime: "" if runtime.name == "bwrap" else "not installed")
    monkeypatch.setattr(backends, "examine", lambda *_words: late)
    found = Backends.probed()
    assert found.bwrap is late and found.why_not["bwrap"] == late.why_not
    assert "bwrap" not in found.untrusted + found.trusted
