"""Runs the fuzz targets under Atheris, one after the other: `make fuzz`.

A target is a test of this folder that Hypothesis feeds. libFuzzer mutates bytes, Hypothesis draws
the target's input from them, and inputs that reach new lines or branches of `tangram_hpc` are kept
as its corpus, which the next run goes on from. One JSON line is printed for each target. An input
that breaks a target's law is shrunk and shown, and the status is then 1.

    run.py [--seconds S] [--corpus FOLDER] [NAME ...]     targets whose names contain a NAME

No corpus is in the repository: a target begins from real files or values that it makes itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MEM_MIB, HANG_S, INPUT_MAX = 2048, 60, 2048
FIRST = 50  # inputs of a new corpus; from very short ones Hypothesis could draw nothing
_DONE = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+).* corp: (\d+)/")


def targets() -> list[str]:
    """The targets, as FILE::TEST."""
    return [f"{path.stem}::{name}" for path in sorted(HERE.glob("test_*.py"))
            for name in re.findall(r"^@given\(.*?^def (test_\w+)", path.read_text(), re.M | re.S)]


def fuzz(target: str, seconds: int, corpus: Path) -> dict[str, Any]:
    """Fuzzes one target in a process of its own; returns what is printed."""
    file, _, name = target.partition("::")
    place = corpus / name
    if not place.exists():
        place.mkdir(parents=True)
        rng = random.Random(name)
        for number in range(FIRST):
            (place / f"first-{number}").write_bytes(rng.randbytes(rng.randrange(64, INPUT_MAX)))
    with tempfile.TemporaryDirectory() as found:
        ran = subprocess.run(
            [sys.executable, __file__, "--one", target, str(place),
             f"-max_total_time={seconds}", f"-timeout={HANG_S}", f"-rss_limit_mb={MEM_MIB}",
             f"-max_len={INPUT_MAX}", "-len_control=0", "-print_final_stats=1",
             f"-artifact_prefix={found}/"],
            capture_output=True, text=True, errors="replace", check=False)
        findings = [path.read_bytes() for path in Path(found).iterdir()]
    counts = dict(re.findall(r"stat::(\w+):\s+(\d+)", ran.stderr))
    done = _DONE.findall(ran.stderr)
    line = {"target": f"{file}::{name}", "seconds": seconds,
            "executions": int(counts.get("number_of_executed_units", 0)),
            "executions_per_s": int(counts.get("average_exec_per_sec", 0)),
            "edges": int(done[-1][1]) if done else None,
            "corpus": sum(1 for _ in place.iterdir()),
            "peak_mib": int(counts.get("peak_rss_mb", 0)), "findings": len(findings)}
    if findings or ran.returncode:
        line["findings"] = max(1, len(findings))
        line["inputs"] = [data.hex() for data in findings]
        line["said"] = (ran.stdout or ran.stderr)[-4000:]  # a traceback is on stdout
    return line


def _one(target: str, argv: list[str]) -> None:
    """Runs in a target's own process: it hands the target over to libFuzzer."""
    import atheris

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    file, _, name = target.partition("::")
    with atheris.instrument_imports(include=["tangram_hpc"]):
        test = getattr(importlib.import_module(file), name)
    atheris.Setup([__file__, *argv], test.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main() -> int:
    """Runs the targets that the command line names; returns the process's status."""
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--corpus", type=Path, default=HERE.parents[1] / ".fuzz")
    parser.add_argument("names", nargs="*")
    args, broken = parser.parse_args(), False
    for target in targets():
        if args.names and not any(name in target for name in args.names):
            continue
        line = fuzz(target, args.seconds, args.corpus)
        broken |= bool(line["findings"])
        print(json.dumps(line), flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
