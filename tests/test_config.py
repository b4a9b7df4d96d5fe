"""Settings: precedence, and one clear line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram_hpc.config import load_config
from tangram_hpc.errors import InvalidInput


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "tangram.toml"
    file.write_text('placer = "fcfs:2"\ngrace_s = 5\nsync = "batch"\n')
    environ = {"TANGRAM_GRACE_S": "7", "TANGRAM_HOME": "x"}
    config = load_config(environ, {"sync": "always", "placer": None}, tmp_path)
    assert (config.placer, config.grace_s, config.sync) == ("fcfs:2", 7.0, "always")
    assert load_config({}, folder=tmp_path / "none").placer == "elastic"


@pytest.mark.parametrize(
    ("text", "environ", "told"),
    [
        ('placr = "fcfs:2"', {}, r"`placr` .*tangram.toml.* not known; did you mean `placer`"),
        ("grace_s = -1", {}, r"`grace_s` .*tangram.toml.*greater than or equal to 0"),
        ('placer = "best"', {}, r"`placer` .*elastic, paper, first-fit, fcfs:K, static:K"),
        ("", {"TANGRAM_SYNC": "sometimes"}, r"`sync` \(TANGRAM_SYNC\)"),
        ("", {"TANGRAM_CPUS": "many"}, r"`cpus` \(TANGRAM_CPUS\).*'many'"),
        ("grace_s = ", {}, r"config file .*tangram.toml"),
    ],
)
def test_wrong_fields_are_one_line(tmp_path: Path, text: str, environ: dict[str, str], told: str
                                   ) -> None:
    (tmp_path / "tangram.toml").write_text(text)
    with pytest.raises(InvalidInput, match=told) as error:
        load_config(environ, folder=tmp_path)
    assert "\n" not in str(error.value)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        load_config({"TANGRAM_CONFIG": str(tmp_path / "no.toml")})
