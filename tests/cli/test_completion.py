"""`tangram completion`: a real shell completes verbs, options, choices and files by its script."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc.cli import VERBS

# what bash does when Tab is pressed behind the words
TAB = """
eval "$1"; shift
function=$(complete -p tangram | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=(tangram "$@") COMP_CWORD=$#
"$function" tangram "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$((COMP_CWORD - 1))]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: subprocess.run([sys.executable, "-m", "tangram_hpc", "completion", shell],
                                  capture_output=True, text=True, check=True).stdout
            for shell in ("bash", "zsh")}


@pytest.mark.parametrize(("words", "found"), [
    (["ac"], {"acct"}),
    ([""], {verb.replace("_", "-") for verb in VERBS}),
    (["acct", "--st"], {"--state", "--starttime"}),
    (["worker", "--j"], {"--job"}),
    (["completion", ""], {"bash", "zsh"}),
    (["--config", "settings."], {"settings.toml"}),
    (["journal", "rep"], {"repair"}),
    (["sim", "coding-200", "--cluster", "settings."], {"settings.toml"}),
    (["template", "check", "settings."], {"settings.toml"}),
    (["worker", "--access", "settings."], {"settings.toml"}),
    (["run", "-j", "1", "--", "cat", "settings."], {"settings.toml"}),
])
def test_tab_completes(scripts: dict[str, str], tmp_path: Path, words: list[str],
                       found: set[str]) -> None:
    (tmp_path / "settings.toml").touch()
    told = subprocess.run(["bash", "-c", TAB, "bash", scripts["bash"], *words], cwd=tmp_path,
                          capture_output=True, text=True, check=True).stdout
    assert set(told.split()) == found


def test_zsh_completes_files_too(scripts: dict[str, str]) -> None:
    assert '"--cluster[cluster file (JSON)]:cluster:_files"' in scripts["zsh"]
    assert ':-- COMMAND ...:_files"' in scripts["zsh"]


def test_zsh_can_read_its_script(scripts: dict[str, str], tmp_path: Path) -> None:
    assert scripts["zsh"].startswith("#compdef tangram") and "acct:" in scripts["zsh"]
    if not shutil.which("zsh"):
        pytest.skip("no zsh here")
    (tmp_path / "_tangram").write_text(scripts["zsh"])
    subprocess.run(["zsh", "-n", str(tmp_path / "_tangram")], check=True)
