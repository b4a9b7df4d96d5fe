"""Reports about sandboxes that a broker had closed because it did not know their sessions."""

from __future__ import annotations

from tangram_hpc.broker.sandbox_reports import DisownedSandboxes
from tangram_hpc.protocol import message as ms


def test_reports_about_a_disowned_sandbox_are_recognized_until_its_end() -> None:
    disowned = DisownedSandboxes()
    disowned.add(1, {5, 6})
    assert not disowned.concerns(2, ms.SandboxDown(5, ""))  # another node
    assert not disowned.concerns(1, ms.SandboxDown(7, ""))  # another session
    assert disowned.concerns(1, ms.SandboxUp(5))
    assert disowned.concerns(1, ms.BackgroundWants(5))
    assert disowned.concerns(1, ms.SandboxDown(5, ""))
    assert not disowned.concerns(1, ms.SandboxUp(5))  # the one that was opened since
    assert not disowned.concerns(1, ms.SandboxDown(5, ""))
    assert disowned.concerns(1, ms.SandboxPacked(6, ""))
    assert not disowned.concerns(1, ms.SandboxPacked(6, ""))
