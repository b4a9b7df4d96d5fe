"""The file that tells a command how many CPUs it has."""

from __future__ import annotations

from pathlib import Path

from helpers.small_folder import in_a_small_folder


def test_the_number_of_cpus_is_told_on_a_disk_that_has_become_full(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from tangram_hpc.sandbox.process.units_file import UnitsFile, path_of
        file = UnitsFile(sys.argv[1])
        try:
            with open(sys.argv[1] + "/other", "wb", buffering=0) as other:
                while True:
                    other.write(bytes(4096))
        except OSError as error:
            print(error.strerror)
        for units in (12, 3, 40):
            file.write(units)
            print(open(path_of(sys.argv[1])).read().split())
        """
    assert in_a_small_folder(tmp_path, "16k", code) == (
        "No space left on device\n['12']\n['3']\n['40']\n")
