"""The code blocks of README.md, CONTRIBUTING.md and of the documents, and what stands for the words
in them that a reader fills in.

A block is a fence. Its language says what it is: `bash` and `python` are run as they are written;
`console` is a command and, after it, exactly what it prints; `toml` is a settings file and is read
as one; `text` and `mermaid` are no commands. A block that cannot be run here has an HTML comment
`<!-- not run: REASON -->` in the line before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md"),
                *(REPO / "docs" / "trainers").glob("*.md"), REPO / "slurm" / "README.md",
                *(REPO / "slurm").glob("*/README.md")])
RUN, NO_COMMANDS = {"bash", "console", "python", "toml"}, {"text", "mermaid"}
_FENCE = re.compile(r"^( *)```(\S*)$")
_MARK = re.compile(r"^ *<!-- not run: (\S.+\S) -->$")
_SLURM = re.compile(r"^[^#]*?((?<![\w.-])(sbatch|srun|sacct) |-j JOB\b|/devcluster )", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fence of a page. `line` is that of its first line of text; `why_not` the mark's reason."""

    page: str
    line: int
    language: str
    text: str
    why_not: str

    @property
    def name(self) -> str:
        """Its page and its first words, which do not change when lines are added above."""
        words = re.findall(r"[\w.-]+", self.text.lstrip("$ #"))[:4]
        return f"{self.page}:{'_'.join(words)}"

    @property
    def needs_slurm(self) -> bool:
        """Whether it calls Slurm, or speaks to a job of Slurm's."""
        return self.language == "bash" and bool(_SLURM.search(self.text))


def blocks(page: Path) -> list[Block]:
    """All fences of a page, in order."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        if fence := _FENCE.match(lines[at]):
            end = next(n for n in range(at + 1, len(lines)) if lines[n] == f"{fence[1]}```")
            mark = _MARK.match(lines[at - 1]) if at else None
            body = [line.removeprefix(fence[1]) for line in lines[at + 1:end]]
            found.append(Block(page.relative_to(REPO).as_posix(), at + 2, fence[2],
                               "\n".join(body) + "\n", mark[1] if mark else ""))
            at = end
        at += 1
    return found


def unfenced(page: Path) -> list[str]:
    """Lines of code that stand in a page by indentation alone: nothing says what they are."""
    found, fence, before, in_list = [], False, "", False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if _FENCE.match(line):
            fence = not fence
        elif not fence:
            if re.match(r" *([-*]|\d+\.) ", line):
                in_list = True
            elif line and not line.startswith(" "):
                in_list = False
            if re.match(r" {4}\S", line) and not before and not in_list:
                found.append(f"{page.name}:{number}: {line.strip()}")
        before = line
    return found


ALL = [block for page in PAGES for block in blocks(page)]
TO_RUN = [b for b in ALL if b.language in RUN and not b.why_not]


def filled(text: str, words: dict[str, str]) -> str:
    """The text with the reader's own words put in."""
    for word, stands_for in words.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(word)}(?![\w-])", lambda _m, s=stands_for: s, text)
    return text
