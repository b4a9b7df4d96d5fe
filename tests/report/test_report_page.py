"""The page of a report in a real browser, and the page of a job with 100,000 actions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import browser
from helpers.mixed_job import JOB, run_mixed_job
from helpers.recorded_job import busy_job, write_job

from tangram_hpc.cli import main

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)]
HOSTILE = ' <img src=x onerror=alert(1)><a href="https://tangram.invalid">x</a>'
MIB = 1 << 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    run_mixed_job(home, hostile=HOSTILE)
    return home


@pytest.fixture(scope="module")
def mixed(home: Path) -> Iterator[Any]:
    """The browser that shows the page of a real mixed run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGRAM_HOME", str(home))
        assert main(["report", JOB, "-o", str(home / "page.html")]) == 0
    with browser.opened(home / "page.html") as driver:
        yield driver


COUNT = """
const shapes = plot => plot.querySelectorAll('.points path, .lines path').length + [
  ...plot.querySelectorAll('image')].filter(
    each => each.href.baseVal.startsWith('data:image/png') && each.getBBox().width > 100).length;
return Object.fromEntries([...document.querySelectorAll('.plot')].map(
  plot => [plot.id, shapes(plot)]));
"""


def drawn(driver: Any) -> dict[str, int]:
    """For each plot how many shapes it has drawn; of the timeline, the picture of its cells."""
    found: dict[str, int] = driver.execute_script(COUNT)
    return found


def test_all_plots_are_drawn_without_an_error(mixed: Any) -> None:
    until = time.monotonic() + 60  # the page draws after it has loaded
    while not all((counts := drawn(mixed)).values()) and time.monotonic() < until:
        time.sleep(0.1)
    assert set(counts) == {"timeline", "load", "parts", "means", "waterfall"}
    assert all(counts.values()), counts
    assert mixed.get_log("browser") == []


def test_a_drag_over_the_timeline_zooms_and_a_double_click_shows_all(mixed: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    def shown() -> list[float]:
        found: list[float] = mixed.execute_script(
            "return document.getElementById('timeline')._fullLayout.xaxis.range.slice()")
        return found

    def settled(is_it: Any) -> list[float]:
        end = time.monotonic() + 20
        while not is_it(shown()) and time.monotonic() < end:
            time.sleep(0.1)
        return shown()

    before = shown()
    area = mixed.find_element("css selector", "#timeline .nsewdrag")
    mixed.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    ActionChains(mixed).move_to_element_with_offset(area, -100, -20).click_and_hold(
        ).move_by_offset(80, 20).move_by_offset(80, 20).release().perform()
    wide = before[1] - before[0]
    after = settled(lambda now: now[1] - now[0] < 0.5 * wide)
    assert before[0] < after[0] < after[1] < before[1] and after[1] - after[0] < 0.5 * wide
    ActionChains(mixed).double_click(area).perform()
    assert settled(lambda now: now == pytest.approx(before)) == pytest.approx(before)


def test_the_unit_under_the_mouse_is_told_in_words(mixed: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    area = mixed.find_element("css selector", "#timeline .nsewdrag")
    mixed.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    ActionChains(mixed).move_to_element_with_offset(area, 5, 3).move_by_offset(3, 2).perform()
    end, said = time.monotonic() + 20, ""
    while not said and time.monotonic() < end:
        said = mixed.find_element("id", "unit").text
    assert " at " in said and (" cpu " in said or " gpu " in said)


def test_figures_on_the_page_are_those_of_acct(mixed: Any, home: Path,
                                              monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(home))
    assert main(["acct", "-j", JOB, "--json"]) == 0
    actions = json.loads(capsys.readouterr().out)["actions"]
    acts = [a["end_ns"] - a["submit_ns"] for a in actions]
    assert mixed.find_element("id", "actions").text == str(len(actions))
    shown = mixed.find_element("id", "act_mean_s").text
    mean_s = sum(acts) / len(acts) / 1e9
    assert shown == (f"{mean_s * 1000:.0f} ms" if mean_s < 1 else f"{mean_s:.2f} s")


def test_names_of_a_model_run_nothing_and_link_nowhere(mixed: Any) -> None:
    links = "return document.querySelectorAll('img, a[href], a[*|href]').length"
    assert mixed.execute_script(links) == 0
    assert "<img src=x" in mixed.find_element("tag name", "body").text


def test_a_job_of_100_000_actions_opens_without_freezing(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser is alive a moment after it loaded the page, whose size is bounded."""
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    write_job(tmp_path, busy_job(100_000))
    path = tmp_path / "page.html"
    assert main(["report", "4711", "-o", str(path), "--simulate", "0"]) == 0
    assert path.stat().st_size < 8 * MIB
    begun = time.monotonic()
    with browser.opened(path) as driver:
        loaded = time.monotonic()
        assert all(drawn(driver).values()) and driver.get_log("browser") == []
        assert driver.find_element("id", "actions").text == "100,000"
        shapes = driver.execute_script("return document.querySelectorAll('*').length")
        driver.execute_script("Plotly.relayout('timeline', {'xaxis.range': [10, 20]})")
        alive = time.monotonic()
    print(f"loaded in {loaded - begun:.1f} s, zoomed in {alive - loaded:.1f} s, {shapes} elements, "
          f"{path.stat().st_size / MIB:.1f} MiB")
    assert shapes < 20_000


def test_pictures_are_written(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(home))
    pytest.importorskip("kaleido")
    assert main(["report", JOB, "-o", str(tmp_path / "page.html"), "--simulate", "0", "--png",
                 str(tmp_path / "png"), "--svg", str(tmp_path / "svg")]) == 0
    names = {"timeline", "load", "parts", "means", "waterfall"}
    for kind, magic in (("png", b"\x89PNG"), ("svg", b"<svg")):
        found = {p.stem: p.read_bytes() for p in (tmp_path / kind).iterdir()}
        assert set(found) == names and all(data.startswith(magic) for data in found.values())
