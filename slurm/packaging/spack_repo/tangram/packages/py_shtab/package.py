"""A dependency of tangram_hpc of which Spack's own repository has only an older version."""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyShtab(PythonPackage):
    """Completion of command lines by shells, made from argparse parsers."""

    homepage = "https://github.com/iterative/shtab"
    pypi = "shtab/shtab-1.7.2.tar.gz"

    license("Apache-2.0")

    version("1.7.2", sha256="8c16673ade76a2d42417f03e57acf239bfb5968e842204c17990cae357d07d6f")

    depends_on("python@3.7:", type=("build", "run"))
    depends_on("py-setuptools@42:", type="build")
    depends_on("py-setuptools-scm@3.4:+toml", type="build")
