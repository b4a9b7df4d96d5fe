"""Starts modules of this package in processes of their own, as `python -m` does, in any directory.

`python -m` looks for all modules in the current directory first. A file that a user has there, such
as `random.py`, would take the place of Python's own module, and a broker or worker that is started
beside it would end with an ImportError. Python 3.11 has an option against that; Python 3.10 has
none. So this file is run by its path, and runs the module.

Invariants: nothing is imported before the folder of this file, in which Python would look first, is
removed from the path. Python has followed links to it, as there are in a view of Spack, so it is
removed by its place. The package is the one that has this file, because a child must be of the
same release as its parent, wherever that was imported from.
"""

from __future__ import annotations

import sys


def module_command(module: str, *words: str) -> list[str]:
    """Returns the command that runs a module of this package with these arguments."""
    return [sys.executable, __file__, module, *words]


def own_command(*words: str) -> list[str]:
    """Returns the command that runs this program, which is `tangram`, with these arguments."""
    if sys.argv[0].endswith("__main__.py"):
        return module_command("tangram_hpc", *words)
    return [sys.executable, sys.argv[0], *words]


def _main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    folder = __file__.rpartition("/")[0]
    import importlib.util
    import runpy

    spec = importlib.util.spec_from_file_location("tangram_hpc", f"{folder}/__init__.py",
                                                  submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
