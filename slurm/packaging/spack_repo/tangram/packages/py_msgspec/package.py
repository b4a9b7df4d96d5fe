"""A dependency of tangram_hpc that Spack's own repository does not have."""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMsgspec(PythonPackage):
    """Serialization and validation of messages, with support for JSON and MessagePack."""

    homepage = "https://github.com/jcrist/msgspec"
    pypi = "msgspec/msgspec-0.21.1.tar.gz"

    license("BSD-3-Clause")

    version("0.21.1", sha256="2313508e394b0d208f8f56892ca9b2799e2561329de9763b19619595a6c0f72c")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-setuptools@80:", type="build")
    depends_on("py-setuptools-scm@8:", type="build")
