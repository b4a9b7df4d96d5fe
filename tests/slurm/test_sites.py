"""The matrix of sites: an ordinary job ends well on clusters in which each two settings of any two
kinds meet once. `make test-sites` prints the table that slurm/README.md has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import REPO, Site, install_for
from sites import axes, trial


def test_the_rows_hold_all_pairs_and_only_what_can_be() -> None:
    rows = axes.rows()
    assert rows == axes.rows() and all(map(axes.can_be, rows))
    assert axes.all_pairs() == set.union(*map(axes.pairs_of, rows))
    assert len(rows) < 25


def test_the_page_for_administrators_has_the_rows() -> None:
    text = (REPO / "slurm" / "README.md").read_text()
    told = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [list(axes.AXES)] == [cells[:-1] for cells in told if cells[0] == "template"]
    results = {tuple(cells[:-1]) for cells in told if cells[-1] in ("passed", "failed")}
    assert results == {tuple(row.values()) for row in axes.rows()}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """How each row ended; printed as a table when the last one has."""
    ended: dict[str, str] = {}
    yield ended
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    terminal.write_line("\n| " + " | ".join([*axes.AXES, "result"]) + " |")
    terminal.write_line("|---" * (len(axes.AXES) + 1) + "|")
    for row in axes.rows():
        cells = [*row.values(), ended.get(str(row), "not run")]
        terminal.write_line("| " + " | ".join(cells) + " |")


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("row", axes.rows(), ids=lambda row: "-".join(row.values()))
def test_an_ordinary_job_ends_well(row: axes.Row, ended: dict[str, str],
                                   tmp_path_factory: pytest.TempPathFactory) -> None:
    ended[str(row)] = "failed"
    with running_cluster(tmp_path_factory, **trial.cluster_of(row)) as cluster:
        trial.run_job(Site(cluster, install_for(cluster)), row)
    ended[str(row)] = "passed"
