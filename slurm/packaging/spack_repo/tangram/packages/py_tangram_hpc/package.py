"""tangram_hpc from a checkout, with Spack's Python and, by `+mpi`, its MPI.

There is no archive of a release that Spack could fetch, so the version `develop` is built from a
folder: `spack install py-tangram-hpc@develop dev_path=/path/to/checkout`. Without `dev_path` Spack
clones the checkout in which this recipe lies, and builds the commit that is checked out there.
"""

import os

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage

CHECKOUT = os.path.abspath(os.path.join(os.path.dirname(__file__), *6 * [".."]))


class PyTangramHpc(PythonPackage):
    """A Slurm job-step broker that packs agentic-RL actions into held allocations."""

    license("Apache-2.0")

    # a version without an address would make `spack info` and `spack audit` fail
    version("develop", git=f"file://{CHECKOUT}")

    variant("mpi", default=True, description="Ranks of a trainer reach the broker by MPI")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-msgspec@0.18:", type=("build", "run"))
    depends_on("py-numpy@1.24:", type=("build", "run"))
    depends_on("py-pydantic@2.5:", type=("build", "run"))
    depends_on("py-cloudpickle@3.0:", type=("build", "run"))
    depends_on("py-cryptography@42:", type=("build", "run"))
    depends_on("py-shtab@1.7:", type=("build", "run"))
    depends_on("py-sqlalchemy@2.0.20:", type=("build", "run"))
    depends_on("py-tomli@2.0:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-mpi4py@4.0:", type=("build", "run"), when="+mpi")
