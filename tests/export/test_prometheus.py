"""The metrics of a real job in a real Prometheus: by way of node_exporter's textfile collector, as
docs/EXPORT.md says. Every query of the dashboard has an answer there, with the labels that its
legend names.

On a busy machine two things make a series disappear for a while, and neither is a fault. Prometheus
drops all series of a scrape that took longer than the interval, one second here, until the next
scrape. And the mean of the last 60 s has no value once no action ended for so long. So a test waits
for the series that it needs, and ends an action whenever it looks for one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.exported_job import exported_job
from helpers.image_rig import free_port

from tangram_hpc import LocalCluster
from tangram_hpc.export.metrics import DASHBOARD

pytest.importorskip("prometheus_client")
PROGRAMS = ("prometheus", "prometheus-node-exporter", "promtool")
pytestmark = [pytest.mark.long, pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)),
    reason="needs prometheus and prometheus-node-exporter: make system-long")]


@contextmanager
def running(*words: str | Path, env: dict[str, str] | None = None) -> Iterator[None]:
    """Runs a program meanwhile."""
    process = subprocess.Popen([*map(str, words)], env=env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def until(found: Callable[[], Any], limit_s: float = 120, what: str = "") -> Any:
    """What a function returns, as soon as that is true; `what` names it in a failure."""
    end_s = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < end_s, what
        time.sleep(0.2)
    return value


class Prometheus:
    """A server that asks every second.

    Args:
        port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **fields: str) -> Any:
        """The data of an answer; None while there is none."""
        query = urllib.parse.urlencode({name.replace("match", "match[]"): value
                                        for name, value in fields.items()})
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=30) as answer:
                told = json.load(answer)
        except ConnectionError:
            return None
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is still starting
                return None
            raise AssertionError(error.read().decode()) from None
        except urllib.error.URLError:
            return None
        assert told["status"] == "success", told
        return told["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        return (self.ask("query", query=query) or {"result": []})["result"]


def settled(view: dict[str, Any]) -> bool:
    """Returns whether a view `top` has two actions that run and four that wait."""
    return (view["running"], sum(view["reasons"].values())) == (2, 4)


# Each test has a job of its own: the actions that one test ends would be running in the last scrape
# of the other's.
@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A job in which two actions run, four wait for CPUs, and others have ended."""
    with exported_job(tmp_path_factory.mktemp("home"), 2) as client:
        for _ in range(6):
            client.submit(["sleep", "600"], trusted=True)
        until(lambda: settled(client.ask("top")))  # before anything is exported
        yield client


@pytest.fixture
def prometheus(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
               ) -> Iterator[Prometheus]:
    folder, port, node_port = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    texts = folder / "texts"
    texts.mkdir()
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({  # JSON is YAML
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "node", "static_configs": [
            {"targets": [f"127.0.0.1:{node_port}"]}]}]}))
    with ExitStack() as stack:
        stack.enter_context(running(
            sys.executable, "-m", "tangram_hpc", "export", "metrics", "-i", "1", "-o",
            texts / "tangram-4711.prom",
            env=os.environ | {"TANGRAM_ACCESS": str(cluster.access)}))
        stack.enter_context(running(
            "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile",
            f"--collector.textfile.directory={texts}",
            f"--web.listen-address=127.0.0.1:{node_port}"))
        stack.enter_context(running(
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}"))
        server = Prometheus(port)
        until(lambda: server.series("tangram_actions_waiting"))
        checked = subprocess.run(["promtool", "check", "metrics"], capture_output=True, text=True,
                                 input=(texts / "tangram-4711.prom").read_text(), check=False)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        yield server


def test_every_query_of_the_dashboard_has_an_answer(cluster: LocalCluster,
                                                    prometheus: Prometheus) -> None:
    def answer(query: str) -> list[dict[str, Any]]:
        cluster.call("judge", "score", n=1).result(60)  # needs no CPU
        return prometheus.series(query)

    board = json.loads(DASHBOARD.read_text())
    [variable] = [v for v in board["templating"]["list"] if v["type"] == "query"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
    assert prometheus.ask(f"label/{label}/values", match=name) == ["4711"]
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 15
    for target in targets:  # Grafana writes the chosen values of a variable as (a|b)
        found = until(partial(answer, target["expr"].replace("$job", "(4711)")),
                      what=target["expr"])
        for series in found:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(series["metric"])
        assert not prometheus.series(target["expr"].replace("$job", "(4712)"))


def test_the_figures_are_those_of_the_job(cluster: LocalCluster, prometheus: Prometheus) -> None:
    info = cluster.ask("info")
    for name, value in (("cpus_held", info["cpus"]), ("cpus_lent", 2), ("actions_running", 2),
                        ("gpus_held", info["gpus"]), ("mem_held_bytes", info["mem_mib"] << 20)):
        [series] = until(partial(prometheus.series, f"tangram_{name}"), what=name)
        assert float(series["value"][1]) == value, name
        assert series["metric"]["tangram_job"] == "4711" and series["metric"]["job"] == "node"
    waiting = until(partial(prometheus.series, "tangram_actions_waiting"))
    assert sum(float(series["value"][1]) for series in waiting) == 4
