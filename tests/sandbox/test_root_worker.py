"""A worker that is root keeps code that it does not trust in namespaces, or refuses to run it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram_hpc import InfeasibleRequest, LocalCluster
from tangram_hpc.config.settings import Config
from tangram_hpc.demo.job import warm
from tangram_hpc.doctor import isolation
from tangram_hpc.doctor.check import CheckContext, SlurmFacts
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.sandbox.manager.backends import Backends

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="of workers that are root")


def test_untrusted_code_of_root_gets_bwrap() -> None:
    found = Backends.probed()
    if "bwrap" not in found.trusted:
        pytest.skip(f"bwrap: {found.why_not.get('bwrap')}")
    assert found.untrusted[0] == "bwrap" and "process" not in found.untrusted
    assert found.box(SessionSpec(1)).backend == "bwrap"


@pytest.fixture(scope="module")
def without_bwrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A machine on which bubblewrap was not installed, nor a container program."""
    folder = tmp_path_factory.mktemp("bin")
    for place in ("/usr/bin", "/bin"):
        for name in os.listdir(place):
            if name not in ("bwrap", "podman", "apptainer", "enroot"):
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(f"{place}/{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        yield


@pytest.mark.usefixtures("without_bwrap")
@pytest.mark.attack("code", "files")
def test_untrusted_code_of_root_without_bwrap_is_refused_naming_bubblewrap() -> None:
    found = Backends.probed()
    assert found.untrusted == ()
    for spec in (SessionSpec(1), SessionSpec(1, backend="process")):
        with pytest.raises(InvalidInput, match=r"worker is root.*install bubblewrap"):
            found.box(spec)
    assert found.box(SessionSpec(1, trusted=True)).backend == "process"
    assert Backends.probed("process").untrusted == (), "a setting does not change it"


@pytest.mark.usefixtures("without_bwrap")
def test_the_doctor_advises_root_to_install_bubblewrap() -> None:
    """Another kernel would not: root needs a program, or is to be an ordinary user."""
    told = isolation.sandboxes(CheckContext({}, Config.model_validate({}), "", SlurmFacts()))
    assert "install bubblewrap, or start workers as an ordinary user" in told.remedy, told
    assert "Landlock ABI" not in told.remedy


@pytest.mark.usefixtures("without_bwrap")
def test_a_cluster_of_root_without_bwrap_runs_what_is_trusted_and_refuses_the_rest(
        tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as cluster:
        for backend in ("", "process"):
            with pytest.raises(InfeasibleRequest, match=r"install bubblewrap|pass trusted=True"):
                cluster.session(backend=backend).opened.result(30)
        with pytest.raises(InfeasibleRequest, match="install bubblewrap, or pass trusted=True"):
            cluster.submit(["/bin/true"]).result(30)
        with cluster.session(trusted=True) as s:
            assert s.exec("echo fine").result(30).text == "fine\n"
        warm(cluster, 1)  # the demo's own programs run all the same


@pytest.mark.parametrize("isolation", ["", "podman"])
def test_a_worker_starts_where_a_container_program_is_all_that_isolates_code(
        without_bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """Commands without an image are refused; the program itself is not run."""
    (tmp_path / "podman").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TANGRAM_ISOLATION", isolation)
    with LocalCluster(cpus=1, home=tmp_path / "home") as cluster:
        assert cluster.ask("nodes")["nodes"][0]["untrusted"] == ["podman"]
        with pytest.raises(InfeasibleRequest, match="install bubblewrap, or pass trusted=True"):
            cluster.submit(["/bin/true"]).result(30)
        with pytest.raises(InfeasibleRequest, match="image: podman builds its sandboxes from an"):
            cluster.session().opened.result(30)
        with cluster.session(trusted=True) as s:
            assert s.exec("echo fine").result(30).text == "fine\n"
        warm(cluster, 1)


@pytest.mark.parametrize("name", ["apptainer", "enroot"])
@pytest.mark.attack("code", "files")
def test_a_worker_that_is_root_offers_no_container_in_which_code_is_root_of_the_node(
        without_bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).symlink_to("/bin/false")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = Backends.probed()
    assert found.untrusted == () and name not in found.trusted
    with pytest.raises(InvalidInput, match=f"{name} cannot be used here .*root of the node"):
        Backends.probed(name)


@pytest.mark.usefixtures("without_bwrap")
def test_the_demo_says_that_its_programs_run_without_isolation() -> None:
    from tangram_hpc.demo.demo_isolation import isolation_warning

    warning = isolation_warning()
    assert "without isolation" in warning and "apt-get install bubblewrap" in warning
