"""What an administrator installs: the package of the plugin; the module files by the real programs,
where they are installed (`MODULES_CMD` of Environment Modules, `LMOD_CMD` of Lmod name them)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).resolve().parents[2] / "slurm"
PROGRAMS = {"tcl": os.environ.get("MODULES_CMD", "/usr/lib/x86_64-linux-gnu/modulecmd.tcl"),
            "lua": os.environ.get("LMOD_CMD", "/usr/share/lmod/lmod/libexec/lmod")}


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("dpkg-deb") and Path("/usr/include/slurm/spank.h").exists()),
                    reason="no dpkg-deb or no libslurm-dev")
def test_the_debian_package_depends_on_one_slurm_release(tmp_path: Path) -> None:
    built = subprocess.run([str(SLURM / "packaging" / "build-deb"), "1.2.3", str(tmp_path)],
                           capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (package,) = tmp_path.glob("slurm-tangram_1.2.3+slurm*.deb")
    told = subprocess.run(["dpkg-deb", "--info", package], capture_output=True, text=True,
                          check=True).stdout
    here = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", "libslurm-dev"],
                          capture_output=True, text=True, check=True).stdout
    release = ".".join(here.rpartition(":")[2].split(".")[:2])
    assert f"slurm-client (>= {release})" in told
    assert re.search(rf"slurm-client \(<< {release.partition('.')[0]}\.\d\d~\)", told)
    names = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, text=True,
                           check=True).stdout
    assert "/slurm-wlm/tangram.so" in names and "epilog.d/50-tangram" in names
    assert all(line.split()[1] == "root/root" for line in names.splitlines())


@pytest.fixture(params=["tcl", "lua"])
def module(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A module tree with our file in it; the words that load it in a shell."""
    kind: str = request.param
    if not os.access(PROGRAMS[kind], os.X_OK):
        pytest.skip(f"no {PROGRAMS[kind]}")
    place = tmp_path / "modules" / "tangram"
    place.mkdir(parents=True)
    shutil.copy(SLURM / "modulefiles" / f"tangram.{kind}",
                place / ("1.2.3" if kind == "tcl" else "1.2.3.lua"))
    program = tmp_path / "opt" / "1.2.3" / "bin" / "tangram"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho this is it\n")
    program.chmod(0o755)
    (tmp_path / "opt" / "1.2.3" / "tangram.toml").write_text("")
    return [PROGRAMS[kind], "bash"]


def shell(module: list[str], folder: Path, script: str, **env: str
          ) -> subprocess.CompletedProcess[str]:
    begin = f'module() {{ eval "$({" ".join(module)} "$@")"; }}\n'
    keep = {k: v for k, v in os.environ.items() if not k.startswith("TANGRAM_")}
    return subprocess.run(["bash", "-c", begin + script], capture_output=True, text=True,
                          check=False, env={**keep, "MODULEPATH": str(folder / "modules"),
                                            "TANGRAM_MODULE_BASE": str(folder / "opt"), **env})


def test_a_module_is_loaded_and_unloaded(module: list[str], tmp_path: Path) -> None:
    root = tmp_path / "opt" / "1.2.3"
    told = shell(module, tmp_path, "module load tangram/1.2.3; tangram; echo $TANGRAM_HPC_ROOT "
                 "$TANGRAM_CONFIG; module unload tangram/1.2.3; echo ${TANGRAM_HPC_ROOT-none} "
                 "${TANGRAM_CONFIG-none} $(command -v tangram | grep -c opt)")
    assert told.stdout.splitlines() == ["this is it", f"{root} {root}/tangram.toml",
                                        "none none 0"], told
    told = shell(module, tmp_path, "module load tangram/1.2.3; echo $TANGRAM_CONFIG; "
                 "module unload tangram/1.2.3; echo $TANGRAM_CONFIG", TANGRAM_CONFIG="/my/own")
    assert told.stdout.split() == ["/my/own", "/my/own"], told


def test_the_environment_module_reports_a_missing_installation(
        module: list[str], tmp_path: Path) -> None:
    told = shell(module, tmp_path, "module load tangram/1.2.3; echo ${TANGRAM_HPC_ROOT-none}",
                 TANGRAM_MODULE_BASE="/nowhere")
    assert told.stdout == "none\n", told
    assert "/nowhere/1.2.3/bin/tangram" in "".join(told.stderr.split("\n")), told.stderr
