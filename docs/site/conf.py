"""How `make docs` builds the site from the Markdown pages as they stand in the repository.

The source folder is the repository itself, so that a relative link means the same in the site, on a
Git server's web view and in an editor. Three things are added while a page is read, because they
would be false soon if somebody had to write them by hand: the navigation (from the sections of
`docs/README.md`), the list of decisions, and the help texts of the command line. Neither the build
nor a reader's browser fetches anything.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from tangram_hpc import __version__
from tangram_hpc.cli import parser

REPO = Path(__file__).resolve().parents[2]
project, version, release = "tangram_hpc", __version__, __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "slurm/README.md", "slurm/*/README.md"]
exclude_patterns = [".*", "build", "dist", "tangram_hpc", "tests", "bench", "*.egg-info"]
html_theme, html_title = "furo", f"tangram_hpc {__version__}"
html_extra_path = ["extra"]
html_show_copyright = html_copy_source = False
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "inherited-members": "Exception,str,int,tuple,Struct"}
suppress_warnings = ["myst.header"]


def sections() -> list[tuple[str, list[str]]]:
    """The sections of docs/README.md: each heading with the pages that its list links to."""
    found: list[tuple[str, list[str]]] = []
    for line in (REPO / "docs" / "README.md").read_text().splitlines():
        if heading := re.match(r"## (.*)", line):
            found.append((heading[1], []))
        elif link := re.match(r"- \[[^]]*\]\(([^)#]+)\)", line):
            found[-1][1].append(os.path.normpath(f"docs/{link[1]}").removesuffix(".md"))
    return found


def toctree(caption: str, pages: list[str]) -> str:
    """A branch of the navigation that is not shown in the page itself."""
    lines = "\n".join(f"/{page}" for page in pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def helps() -> str:
    """A heading and the help text of each verb."""
    os.environ["COLUMNS"] = "96"
    verbs = next(action.choices for action in parser()._actions
                 if isinstance(action, argparse._SubParsersAction))
    return "\n".join(f"\n## tangram {verb}\n\n```text\n{p.format_help()}```\n"
                     for verb, p in verbs.items())


def add_what_is_generated(_app: Sphinx, page: str, source: list[str]) -> None:
    """Appends to a page what is made from the tree: Sphinx's event `source-read`."""
    if page == "README":
        source[0] += "".join(toctree(caption, pages) for caption, pages in sections())
    elif page == "docs/README":
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif page == "docs/decisions/README":
        records = sorted((REPO / "docs" / "decisions").glob("[0-9]*.md"))
        source[0] += toctree("Records", [f"docs/decisions/{p.stem}" for p in records])
    elif page == "docs/reference/COMMANDS":
        source[0] += helps()


def show_examples_as_code(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object,
                          lines: list[str]) -> None:
    """Makes a literal block of the code under `Example:` in a docstring, which the Google style
    would read as prose: Sphinx's event `autodoc-process-docstring`."""
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].strip() == "Example:":
            lines[at:at + 1] = [lines[at] + ":", ""]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_what_is_generated)
    app.connect("autodoc-process-docstring", show_examples_as_code, priority=400)  # napoleon: 500
