"""What `make docs` needs of the pages, without building them; `make test-long` builds the site.

Every page is in the navigation, every relative link and anchor leads somewhere, every decision is
in the index, and every public name is in the reference.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import tangram_hpc

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
PAGES = sorted([*REPO.glob("*.md"), *DOCS.rglob("*.md"), *(REPO / "slurm").glob("*.md"),
                *(REPO / "slurm").glob("*/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its fences and code in backquotes."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(page: Path) -> set[str]:
    """The anchors that a Git server's web view and MyST give to the headings of a page."""
    found: set[str] = set()
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = 0
        while (f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(f"{name}-{number}" if number else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_every_relative_link_and_anchor_exists(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == [], "a relative link names a file, and an anchor one of its headings"


def test_every_page_is_in_the_navigation() -> None:
    named = {(DOCS / link.partition("#")[0]).resolve()
             for link in _LINK.findall(prose(DOCS / "README.md"))}
    unseen = [p.relative_to(REPO).as_posix() for p in PAGES if p not in named
              and p not in (REPO / "README.md", DOCS / "README.md")
              and not re.match(r"\d{4}-", p.name)]
    assert unseen == [], "name the page in a section of docs/README.md"


def test_every_decision_is_in_the_index() -> None:
    told = re.findall(r"^\| \[(\d{4})\]\((\1-[\w-]+\.md)\) \| \S", (
        DOCS / "decisions" / "README.md").read_text(), re.MULTILINE)
    records = sorted(p.name for p in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [name for _, name in told] == records, "each record needs a row, in order"


def test_every_public_name_is_in_the_reference() -> None:
    shown = re.findall(r"^\.\. auto\w+:: tangram_hpc\.(\w+)$", (
        DOCS / "reference" / "API.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(set(tangram_hpc.__all__) - {"__version__"})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning() -> None:
    told = subprocess.run(["make", "docs"], cwd=REPO, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert (REPO / "build" / "docs" / "docs" / "reference" / "API.html").is_file()
