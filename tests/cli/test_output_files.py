"""The files that verbs write for people: when the disk is full, what was there before stays, and
no half of a new file or temporary file is left."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from helpers.ordinary_user import ordinary_user
from helpers.recorded_job import busy_job, write_job

from tangram_hpc import atomic_file
from tangram_hpc.cli import main
from tangram_hpc.domain.event import ActionSubmitted
from tangram_hpc.errors import InvalidInput
from tangram_hpc.export.usage_record import NAMESPACE
from tangram_hpc.simulator.pictures import curve_svg

SIM = ("sim", "coding-200", "--cluster", "coding-200", "--policy", "fcfs:4", "--records")


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Lets no write get a file beyond this size, which fails as on a full disk (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("words", [("report", "4711", "--simulate", "0", "-o"), SIM,
                                   ("export", "csv", "-j", "4711", "-o")])
def test_a_full_disk_leaves_the_file_of_before(
        words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    if words[0] == "report":
        pytest.importorskip("plotly")
    write_job(tmp_path / "home", busy_job(400, 1, 4), "4711")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    (folder := tmp_path / "out").mkdir()
    (target := folder / "file").write_text("before")
    with no_file_beyond(50_000):
        assert main([*words, str(target)]) == 2
    assert "File too large" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert target.read_text() == "before"


def test_a_picture_that_cannot_be_written_leaves_the_one_of_before(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (target := tmp_path / "curve.svg").write_text("before")
    with no_file_beyond(1000), pytest.raises(InvalidInput, match="File too large"):
        monkeypatch.setattr(curve_svg, "svg", lambda panels: "x" * 2000)
        curve_svg.write([], target)
    assert target.read_text() == "before" and len([*tmp_path.iterdir()]) == 1


def test_a_device_is_written_as_it_is_and_a_link_stays(tmp_path: Path) -> None:
    with atomic_file.replacing_output(Path("/dev/null")) as path:
        assert path == Path("/dev/null")
    (target := tmp_path / "file").write_text("before")
    (link := tmp_path / "link").symlink_to("file")
    with atomic_file.replacing_output(link) as path:
        path.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"


@pytest.mark.parametrize("words", [("csv", "-j", "4711"), ("grafana",)])
def test_an_export_into_a_pipe_or_a_link_leaves_them_there(words: tuple[str, ...], tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path / "home", busy_job(20, 1, 4), "4711")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    (folder := tmp_path / "out").mkdir()
    (folder / "link").symlink_to("file")
    assert main(["export", *words, "-o", str(folder / "link")]) == 0
    assert (folder / "link").is_symlink()
    wanted = (folder / "file").read_text()
    os.mkfifo(folder / "fifo")
    reader = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert main(["export", *words, "-o", str(folder / "fifo")]) == 0
    assert (folder / "fifo").is_fifo() and os.read(reader, 1 << 20).decode() == wanted
    os.close(reader)
    printed = subprocess.run(
        [sys.executable, "-m", "tangram_hpc", "export", *words, "-o", "/proc/self/fd/1"],
        env=os.environ, stdout=subprocess.PIPE, check=True)
    assert printed.stdout.decode() == wanted


def test_an_export_to_stdout_is_utf8_in_an_old_locale(tmp_path: Path) -> None:
    """Prometheus and XML readers refuse other bytes, and escapes such as \\u03bb."""
    told = busy_job(20, 1, 4)
    names = {e.action.id: "bel\u00f8nning-\u03bb" for e in told if isinstance(e, ActionSubmitted)}
    told = [msgspec.structs.replace(e, action=msgspec.structs.replace(
        e.action, name=names[e.action.id])) if isinstance(e, ActionSubmitted) else e for e in told]
    write_job(tmp_path, told, "4711")
    for coding in ("ascii", "latin-1"):
        printed = subprocess.run(
            [sys.executable, "-m", "tangram_hpc", "export", "usage-record", "-j", "4711"],
            env={**os.environ, "TANGRAM_HOME": str(tmp_path), "PYTHONIOENCODING": coding},
            stdout=subprocess.PIPE, check=True)
        found = {tag.text for tag in ET.fromstring(printed.stdout).iter(f"{{{NAMESPACE}}}JobName")}
        assert found == {*names.values()}, coding


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    """As one that is written over: a private file stays private, and a group's stays the group's.
    """
    for mode in (0o600, 0o664, 0o444):
        (target := tmp_path / f"{mode:o}").write_text("before")
        target.chmod(mode)
        with atomic_file.replacing_output(target) as path:
            path.write_text("after")
        assert target.read_text() == "after" and target.stat().st_mode & 0o777 == mode | 0o200


@pytest.mark.parametrize("words", [
    SIM, ("replay", "coding-200", "--scale", "1", "--records"),
    ("size", "coding-200", "--cluster", "coding-200", "--target-act", "9", "--plot"),
    ("plan", "--model", "7B", "--gpus", "8", "--plot"), ("sim", "rl", "rl-48", "--plot")])
def test_a_file_that_cannot_be_written_is_told_before_the_work(
        words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    def work(*args: object, **names: object) -> None:
        raise AssertionError("the work was begun")

    for place in ("simulator.workload.read_workload", "config.planner.files.read_model",
                  "libra.simulation.rl_scenario.read_rl_scenario"):
        monkeypatch.setattr(f"tangram_hpc.{place}", work)
    target = tmp_path / "missing" / "curve.svg"
    assert main([*words, str(target)]) == 2
    assert f"{words[-1]} {target}: No such file or directory" in capsys.readouterr().err


_AGREE = """
import os, sys
from pathlib import Path
from tangram_hpc.atomic_file import check_output, replacing_output
from tangram_hpc.errors import InvalidInput

reader = os.open("open/pipe", os.O_RDONLY | os.O_NONBLOCK)
for name in sys.argv[1:]:
    told = []
    for write in (False, True):
        try:
            if write:
                with replacing_output(Path(name)) as target:
                    target.write_text("new")
            else:
                check_output("-o", Path(name))
            told.append("yes")
        except (InvalidInput, OSError):
            told.append("no")
    print(name, *told)
"""


def test_what_is_refused_before_the_work_is_what_could_not_be_written_after_it() -> None:
    """A file without write permission is replaced where its folder may be written, and a link is
    followed."""
    with ordinary_user() as user:
        for name in ("open", "closed"):
            (folder := user.folder / name).mkdir()
            for file in ("own", "read-only"):
                (folder / file).write_text("before")
            (folder / "read-only").chmod(0o444)
            (folder / "link").symlink_to("../open/later")
            (folder / "dangling").symlink_to("missing/file")
        os.mkfifo(user.folder / "open" / "pipe")
        user.take_over()
        (user.folder / "closed").chmod(0o555)
        can = ["open/own", "open/read-only", "closed/link", "open/link", "open/pipe", "closed/own",
               "/dev/null", "new"]
        cannot = ["open", "open/dangling", "open/missing/file", "closed/read-only", "closed/new",
                  "closed/dangling", "/etc/hostname", "open/own/file"]
        told = user.run("-c", _AGREE, *can, *cannot)
    assert told.stdout.splitlines() == [
        f"{name} {each} {each}" for each, names in (("yes", can), ("no", cannot)) for name in names]


@pytest.mark.parametrize("scale", ["0", "nan", "inf", "1e9"])
def test_a_demo_whose_latencies_would_not_end_is_refused(
        scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--scale", scale, "--cpus", "-1"]) == 2  # refused in any case
    assert "--scale" in capsys.readouterr().err
