"""Writes the man page of `tangram` into a folder, from the same parsers as `--help`.

    python docs/man_page.py build/man

It needs the extra `docs`.
"""

import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "80"  # usage lines are broken where a page of this width ends

from argparse_manpage.manpage import Manpage

from tangram_hpc import __version__
from tangram_hpc.cli import parser

verbs = parser()
# `man -k` finds the page by the line "tangram - what it does" below NAME
page = Manpage(verbs, format="single-commands-section", _data={
    "project_name": "tangram_hpc", "version": __version__,
    "description": (verbs.description or "").rstrip("."),
    "manual_title": "Slurm job-step broker for agentic RL"})
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "tangram.1").write_text(str(page))
