"""What pyproject.toml cannot say: the batch templates are installed beside the package, and plain
commands in sandboxes are served by a small library in C where one can be built.
"""

from glob import glob

from setuptools import Extension, setup

FAST_PATH = Extension("tangram_hpc.sandbox.process._fast_path",
                  ["tangram_hpc/sandbox/process/_fast_path.c"],
                  extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
                  optional=True)  # without a compiler all is served by Python

setup(data_files=[("share/tangram_hpc/sbatch_templates", sorted(glob("sbatch_templates/*")))],
      ext_modules=[FAST_PATH])
