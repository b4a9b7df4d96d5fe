"""What pyproject.toml cannot say: the batch templates and the files for a site are installed beside
the package, and plain commands in sandboxes are served by a small library in C where one can be
built.

The library knows nothing of Python: it is loaded by ctypes and uses no header of Python. So one
build serves every version of Python, and a wheel is tagged `py3-none-PLATFORM`
(docs/decisions/0106-one-wheel-for-each-libc.md).

A package index shows README.md without the files beside it. Where the source can be read is a fact
of each release, so TANGRAM_HOME_URL names it, such as "https://HOST/OWNER/NAME/blob/v0.1.0": links
between files then lead there. Without it such links are shown as their text.
"""

import os
import re
from glob import glob
from os.path import isfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "tangram_hpc.sandbox.process._fast_path"
FAST_PATH = Extension(LIBRARY, ["tangram_hpc/sandbox/process/_fast_path.c"],
                      extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
                      optional=True)  # without a compiler all is served by Python
# what `tangram site files` gives an administrator; the dev cluster is for developers
SPACK = "slurm/packaging/spack_repo/tangram"
SITE = ("slurm", "slurm/epilog.d", "slurm/modulefiles", "slurm/packaging", "slurm/spank", SPACK,
        *glob(f"{SPACK}/packages/*"))


class BuildPlainLibrary(build_ext):
    """Builds the library under a name without a version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Returns the path of the library, relative to the folder that holds the package."""
        return fullname.replace(".", "/") + ".so"


class WheelForAnyPython(bdist_wheel):
    """Tags the wheel for its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


def shipped(folder: str) -> tuple[str, list[str]]:
    """Returns where the files of a folder are installed, and these files; built ones stay out."""
    files = [path for path in sorted(glob(f"{folder}/*"))
             if isfile(path) and not path.endswith((".so", ".o"))]
    return f"share/tangram_hpc/{folder}", files


def index_page(text: str, home: str) -> str:
    """Returns README.md as a package index shows it.

    Args:
        text: README.md, in which links between files are relative.
        home: address below which the release's files can be read; empty if there is none.
    """
    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        if home:
            return f"{picture}[{words}]({home.rstrip('/')}/{target})"
        return "" if picture else words

    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", link, text)


HOME = os.environ.get("TANGRAM_HOME_URL", "")
PAPERS = {"ARL-Tangram": "https://arxiv.org/abs/2603.13019",
          "Libra": "https://arxiv.org/abs/2606.03077"}
PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Source": "README.md"}

setup(long_description=index_page(Path("README.md").read_text(encoding="utf-8"), HOME),
      long_description_content_type="text/markdown",
      project_urls=PAPERS | ({name: f"{HOME.rstrip('/')}/{page}" for name, page in PAGES.items()}
                             if HOME else {}),
      data_files=[shipped(folder) for folder in ("sbatch_templates", *SITE)],
      ext_modules=[FAST_PATH],
      cmdclass={"build_ext": BuildPlainLibrary, "bdist_wheel": WheelForAnyPython})
