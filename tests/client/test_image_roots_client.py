"""Sessions with an image, as a client asks for them: who writes, as whom, and what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.root_folder_rig import make_image

from tangram_hpc import ActionFailed, InfeasibleRequest, LocalCluster
from tangram_hpc.cli import main
from tangram_hpc.errors import InvalidInput


def test_a_client_runs_an_image_session_as_root(
        tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    image = str(make_image(tmp_path / "image"))
    with LocalCluster(cpus=2, home=tmp_path / "home", warm=0) as cluster:
        node = cluster.client.ask("nodes")["nodes"][0]  # type: ignore[union-attr]
        if "bwrap" not in node["untrusted"] or not node["image_root"]:
            pytest.skip(f"no image can be written here: {node}")
        with cluster.session(image=image, user="pg") as session:
            assert session.spec.writable and session.spec.user == "pg"
            session.exec("touch /testbed/x", user=0).result(30).check()
            result = session.exec("echo $HOME; id -u").result(30).check()
            several = "+users" in result.isolation
            assert result.text == f"/var/lib/pg\n{105 if several else 0}\n"
            assert result.isolation == (
                f"bwrap+{node['image_root']}{'+users' if several else ''}+seccomp")
            assert session.exec("echo $USER", user=0).result(30).text == "root\n"
            unknown = session.exec("true", user="nope").result(30)
            assert unknown.exit_code == 126 and "no user 'nope'" in unknown.reason
            real = session.exec("id -u", user="pg", real_user=True).result(30)
            assert (real.exit_code, real.text) == ((0, "105\n") if several else (126, ""))
            for user, told in (("", "pg"), ("root", "root")):
                with session.pty("echo $USER", user=user) as pty:
                    assert b"".join(pty).strip() == told.encode()
                with session.shell(user=user) as shell:
                    number = "105" if several and told == "pg" else "0"
                    assert shell.run("echo $USER; id -u").result(30).text.split() == [told, number]
            with pytest.raises(ActionFailed, match=r"shell: .* no user 'nope'"), session.shell(
                    user="nope"):
                pass
            with session.fork(user="root") as copy:
                assert copy.exec("ls /testbed; echo $USER").result(30).text.split() == [
                    "folder", "old", "x", "root"]
        with cluster.session(image=image, writable=False) as session:
            assert session.exec("touch /testbed/x").result(30).exit_code
        lost = cluster.session(image=str(tmp_path / "gone"))
        with pytest.raises(InfeasibleRequest, match=r"image: .*gone: No such file or directory"):
            lost.opened.result(30)
            lost.exec("true").result(30)
        for wrong in (-1, 1.5, True, "x" * 81, None):
            with pytest.raises(InvalidInput, match=r"^user: "):
                cluster.submit("true", user=wrong)
            with pytest.raises(InvalidInput, match=r"^user: "):
                lost.shell(user=wrong)
        with pytest.raises(InvalidInput, match=r"^user: only a session has users"):
            cluster.submit("true", user="root")
        with pytest.raises(InvalidInput, match=r"^user: only a session has users"):
            cluster.pty("true", user="root")
        capsys.readouterr()
        assert main(["info", "-j", cluster.job]) == 0
        assert f"bwrap+{node['image_root']}" in capsys.readouterr().out
