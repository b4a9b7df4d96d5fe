"""A headless Chromium that opens a page from a file, for tests and for pictures of the documents.

It needs Debian's packages `chromium` and `chromium-driver`, and Selenium. A page gets no network.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = next((f"{name} is not installed; `make system-long` installs it as root on Debian"
                for name in ("chromium", "chromedriver") if shutil.which(name) is None), "")


@contextmanager
def opened(page: Path, width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """The driver of a browser that has loaded this file."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
                 f"--window-size={width},{height}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
    try:
        driver.set_page_load_timeout(120)
        driver.get(page.resolve().as_uri())
        yield driver
    finally:
        driver.quit()
