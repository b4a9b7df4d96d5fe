"""Sessions whose image has several users, for a user with subordinate ranges and no other power.

The ranges are given to `nobody` in a mount namespace, so the machine's own files stay as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers.ordinary_user import other_users_python, users_environment

NOBODY = 65534
HERE = Path(__file__).resolve().parent.parent
# newuidmap reads these files. The whole folder is replaced, because a mount on one of its files
# vanishes when another test adds a user to the machine: a new file is renamed over it. A lock of
# that moment may be gone before cp opens it; cp then copies the rest, and fails.
# --clear-groups: an ordinary user has no group of root
AS_NOBODY = """
[ -d "$0/etc" ] || cp -a /etc "$0/etc" 2>/dev/null || [ -s "$0/etc/group" ] || exit 9
for file in subuid subgid; do
    echo '65534:300000:65536' >"$0/etc/$file" || exit 9
done
mount --bind "$0/etc" /etc || exit 9
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""


@pytest.mark.timeout(400)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not shutil.which("newuidmap"), reason="newuidmap is not installed (uidmap)")
def test_sessions_with_several_users_as_nobody() -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    folder = Path(tempfile.mkdtemp(prefix="tangram-subordinate-"))
    os.chown(folder, NOBODY, NOBODY)
    env = users_environment(folder)
    begin = ["unshare", "--mount", "sh", "-c", AS_NOBODY, str(folder), python]
    try:
        seen = subprocess.run([*begin, "-c", "import pytest, helpers.executor_rig"], cwd=folder,
                              capture_output=True, check=False, env=env)
        if seen.returncode:
            pytest.skip(f"no other user can read where this checkout lies ({seen.stderr[-300:]!r})")
        done = subprocess.run(
            [*begin, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60",
             f"--basetemp={folder}/base", f"--rootdir={HERE.parent}", "-m", "not long",
             str(HERE / "sandbox/test_image_users.py")],
            capture_output=True, text=True, timeout=380, check=False, cwd=folder, env=env)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed and int(passed[1]) > 25, done.stdout[-2000:]
        left = [path for path in folder.rglob("*") if path.lstat().st_uid >= 300_000]
        assert not left, "files of subordinate users are left"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
