"""Names of images as people write them."""

from __future__ import annotations

import pytest

from tangram_hpc.domain.image_name import parse_image_name
from tangram_hpc.errors import InvalidInput

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize("text, full", [
    ("ubuntu", "docker.io/library/ubuntu:latest"),
    ("ubuntu:22.04", "docker.io/library/ubuntu:22.04"),
    ("docker://ubuntu", "docker.io/library/ubuntu:latest"),
    ("swebench/sweb.eval.x86_64.django__django-11099:latest",
     "docker.io/swebench/sweb.eval.x86_64.django__django-11099:latest"),
    ("localhost/app", "localhost/app:latest"), ("localhost:5000/app:1", "localhost:5000/app:1"),
    ("registry.example/a/b/c", "registry.example/a/b/c:latest"),
    ("[::1]:5000/a", "[::1]:5000/a:latest"),
    (f"app@{DIGEST}", f"docker.io/library/app@{DIGEST}"),
    (f"registry.example/app:1@{DIGEST}", f"registry.example/app@{DIGEST}"),
    ("/images/a.sif", "/images/a.sif"), ("oci:/images/a", "oci:/images/a"),
    ("oci:/images/a:v1", "oci:/images/a:v1"),
    ("oci-archive:/i/a.tar:v1", "oci-archive:/i/a.tar:v1"),
    ("docker-archive:/i/a.tar", "docker-archive:/i/a.tar"),
    ("docker-archive:/i/a.tar:example.org/x/y:1", "docker-archive:/i/a.tar:example.org/x/y:1"),
    ("oci:latest", "docker.io/library/oci:latest"),
])
def test_every_way_of_writing_one(text: str, full: str) -> None:
    name = parse_image_name(text)
    assert (name.text, name.full) == (text, full)


@pytest.mark.parametrize("text, why", [
    ("", "no name"), (" ubuntu", "no name"), ("a\nb", "no name"), ("a\0", "no name"),
    ("Ubuntu", "no name"), ("a//b", "no name"), ("../x", "relative path"), ("./x.sif", "relative"),
    ("x.sif", "relative path"), ("~/x", "relative path"), ("oci:./x", "no absolute path"),
    ("library://a/b", "unknown scheme library://"), ("http://a/b", "unknown scheme"),
    ("a@sha256:12", "no digest"), ("a@md5:" + "0" * 32, "no digest"), ("a:", "no name"),
    ("a:" + "t" * 200, "no name"), ("-a/b", "no name"), ("a/../b", "no name"),
    ("reg.example:99999999/a", "no name"),
])
def test_a_wrong_name_says_how_one_is_written(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as told:
        parse_image_name(text)
    assert str(told.value).startswith("image: ") and "\n" not in str(told.value)
