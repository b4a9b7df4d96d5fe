"""A dependency of tangram_hpc that Spack's own repository does not have."""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMsgspec(PythonPackage):
    """Serialization and validation of MessagePack and JSON."""

    homepage = "https://jcristharif.com/msgspec/"
    pypi = "msgspec/msgspec-0.19.0.tar.gz"

    license("BSD-3-Clause")

    version("0.19.0", sha256="604037e7cd475345848116e89c553aa9a233259733ab51986ac924ab1b976f8e")

    depends_on("c", type="build")
    depends_on("python@3.8:", type=("build", "link", "run"))
    depends_on("py-setuptools", type="build")
