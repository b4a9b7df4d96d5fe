"""Takes the picture of a report for the documents: docs/pictures/report.png.

    python docs/pictures/screenshot_report.py     # half a minute

The job is the shipped workload coding-200, played by the simulator on 232 CPUs, so the picture is
of the same figures wherever it is taken. It needs Chromium, its driver and Selenium (`make
system-long`, `make install`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from helpers.browser import opened  # noqa: E402
from helpers.recorded_job import played, write_job  # noqa: E402

from tangram_hpc.cli import main  # noqa: E402
from tangram_hpc.simulator.sizing import Holding, resized  # noqa: E402
from tangram_hpc.simulator.workload import read_cluster, read_workload  # noqa: E402

HIGH = 1560  # pixels: down to the end of the timeline


def take(target: Path) -> None:
    """Writes the picture of a report of the shipped workload into a PNG file."""
    work, cluster = read_workload(Path("coding-200")), read_cluster(Path("coding-200"))
    events = played(work, resized(cluster, Holding(232, 0)), "elastic")[1]
    with tempfile.TemporaryDirectory() as home:
        write_job(Path(home), events)
        os.environ["TANGRAM_HOME"] = home
        page = Path(home) / "report.html"
        assert main(["report", "4711", "-o", str(page)]) == 0
        with opened(page, 1100, HIGH) as driver:
            time.sleep(2)  # the plots fit themselves to the window
            driver.save_screenshot(str(target))


if __name__ == "__main__":
    take(HERE / "report.png")
