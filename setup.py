"""What pyproject.toml cannot say: the batch templates are installed beside the package."""

from glob import glob

from setuptools import setup

setup(data_files=[("share/tangram_hpc/sbatch_templates", sorted(glob("sbatch_templates/*")))])
