"""Bugs that are planted into a copy of the tree, to see whether the tests would find them.

`bugs.toml` has them as pairs of texts, `python -m planted` (in the folder `tests`) plants one after
the other, and plays swarm seeds, or runs a test, until it is found. A bug that is not found shows a
law that nobody checks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
SEEDS = 300  # in which a bug must be found, unless it says another number


@dataclass(frozen=True)
class PlantedBug:
    """One bug.

    Attributes:
        name: what is wrong.
        area: the part of the product.
        file: its file, below the package.
        old, new: the text that is replaced, and what takes its place.
        found_by: "swarm", or the test that finds it.
        seeds: the number of seeds in which the swarm must find it.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    found_by: str = "swarm"
    seeds: int = SEEDS

    def plant(self, tree: Path) -> None:
        """Puts the bug into a tree.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        path = tree / "tangram_hpc" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text occurs {text.count(self.old)} times in "
                             f"{self.file}, not once")
        path.write_text(text.replace(self.old, self.new))


def planted_bugs() -> list[PlantedBug]:
    """All bugs of the list."""
    told = tomllib.loads((HERE / "bugs.toml").read_text())
    return [PlantedBug(**bug) for bug in told["bug"]]
