"""Fixtures that several files share: a real Slurm with this package on it, a real executor, a
folder for sockets."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import forked_start
from helpers.devcluster_fixture import RunningCluster, running_cluster
from helpers.executor_rig import SECRETS, Rig
from helpers.slurm_site import Site, install_for

# Tests that judge times or shares of CPU, by their file; () stands for all tests of the file. In
# `make test` nothing runs beside them, so that a core idles for most of their time. The rest runs
# beside the Slurm tests, which mostly wait.
ALONE: dict[str, tuple[str, ...]] = {
    "test_endpoints": ("test_refused_requests_are_repeated_and_others_only_if_idempotent",
                       "test_a_request_that_times_out_ends_with_the_reason",
                       "test_a_trainer_that_stood_still_does_not_break_the_limit_afterwards",
                       "test_an_endpoints_rate_is_used_up_and_never_exceeded"),
    "test_enforce": ("test_cpu_time_is_limited_where_cores_are_not",
                     "test_repeating_an_unchanged_binding_is_cheap",
                     "test_a_frozen_group_uses_no_cpu_time"),
    "test_idle_sessions": (
        "test_an_idle_session_uses_no_cpu_though_it_has_busy_loops",
        "test_background_share_gets_little_cpu_time_and_background_end_none",
        "test_under_memory_pressure_the_action_furthest_above_its_request_is_killed"),
    "test_resize": ()}

# Files whose tests ask how a process starts, what /proc says of it, or what a worker finds out on
# its node: nothing is forked for them (tests/helpers/forked_start.py).
REAL_STARTS = frozenset(f"test_{name}" for name in (
    "backends", "doctor", "hostile_secrets", "open_network", "root_worker", "secrets"))

# A long test that says nothing else ends as a failure after so long: it may take a minute and more
# of CPU time, and the 180 s of all others are too few for that where many share the cores.
LONG_S = 900

# `nohup` and a shell's `&` hand these on as ignored, and nothing below could be interrupted then
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT
                      else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist has a folder of one letter (it would be `popen-gw0`), as the path of
    a Unix socket may have 107 bytes only."""
    if hasattr(config, "workerinput"):
        number = config.workerinput["workerid"].removeprefix("gw")
        config.option.basetemp = str(Path(config.option.basetemp).with_name(number))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names a long bytes parameter by its argument alone. No reader could recognize the bytes, and
    bytes that hold a time would differ between the workers of pytest-xdist, which then run nothing.
    """
    return argname if isinstance(val, bytes) and len(val) > 40 else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` runs the tests of `ALONE` while nothing is beside them. To read the other 300
    files for it would take seconds in which a core idles."""
    others = collection_path.name.startswith("test_") and collection_path.stem not in ALONE
    return True if others and config.getoption("markexpr") == "not long and alone" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses."""
    for item in items:
        names = ALONE.get(item.path.stem)
        if names == () or (names and item.name.partition("[")[0] in names):
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """In the short tests without Slurm, `tangram` starts by a fork."""
    marks = {mark.name for mark in item.iter_markers()}
    if item.path.stem in REAL_STARTS or marks & {"slurm", "gpu", "long"}:
        forked_start.uninstall()
    else:
        forked_start.install()
    return (yield)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder with a name of few characters. `tmp_path` leaves too little room for the path
    of a Unix socket (107 bytes) if the name of the user or of the test is long.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    # five nodes share this machine's cores: a busy test must not pass for a dead node
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=2, trainer_nodes=1,
                         cpus_per_node=16, conf_line=["SlurmdTimeout=300"]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def site(slurm: RunningCluster) -> Site:
    return Site(slurm, install_for(slurm))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    rig = Rig(tmp_path)
    yield rig
    rig.close()
    assert rig.processes() == []
