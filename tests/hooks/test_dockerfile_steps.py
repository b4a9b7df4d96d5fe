"""Which steps are read from a Dockerfile, and which instructions are refused."""

from __future__ import annotations

import subprocess

import pytest

from tangram_hpc.errors import InvalidInput
from tangram_hpc.hooks.harness.dockerfile_steps import (
    BuildCommand,
    BuildCopy,
    BuildFolder,
    base_image,
    recipe,
    working_directory,
)

BASE = {"PATH": "/usr/bin", "SPACE": "a b", "EMPTY": ""}


def run_lines(text: str) -> list[tuple[str, ...]]:
    return [step.argv for step in recipe(f"FROM x\n{text}", BASE).steps
            if isinstance(step, BuildCommand)]


@pytest.mark.parametrize(("text", "image"), [
    ("FROM ubuntu:22.04", "ubuntu:22.04"),
    ("# syntax=docker/dockerfile:1\n\nARG V=3.12\nFROM --platform=linux/amd64 python:${V} AS base",
     "python:3.12"),
    ("from registry.example:5000/a@sha256:12\n", "registry.example:5000/a@sha256:12")],
    ids=["plain", "argument", "digest"])
def test_the_base_image_is_that_of_from(text: str, image: str) -> None:
    assert base_image(text) == image


@pytest.mark.parametrize("text", ["", "RUN x", "FROM scratch", "FROM ${MISSING}"])
def test_a_dockerfile_without_an_image_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="FROM"):
        base_image(text)


def test_lines_are_joined_and_comments_left_out() -> None:
    assert run_lines("RUN one && \\\n  # a comment\n\n  two\nRUN three # kept\n") == [
        ("/bin/sh", "-c", "one &&    two"), ("/bin/sh", "-c", "three # kept")]


def test_any_white_space_separates_an_instruction_from_its_arguments() -> None:
    made = recipe("FROM\tx\nENV\tA\tone two\nRUN\tgo\nRUN \t--mount=type=cache,target=/c\t on\n"
                  "COPY\t--chmod=644\ta\t/b", {})
    assert [step.argv for step in made.steps if isinstance(step, BuildCommand)] == [
        ("/bin/sh", "-c", "go"), ("/bin/sh", "-c", "on")]
    assert made.env == {"A": "one two"} and made.steps[2] == BuildCopy(5, ("a",), "/b", 0o644)


def test_lists_and_shells_are_words() -> None:
    assert run_lines('RUN ["a", "$B"]\nSHELL ["/bin/bash", "-lc"]\nRUN c [d]') == [
        ("a", "$B"), ("/bin/bash", "-lc", "c [d]")]


def test_here_documents_are_a_script_or_the_input_of_a_command() -> None:
    assert run_lines("RUN <<EOF\none\ntwo\nEOF\nRUN cat <<'X' >f\n$A\nX\n") == [
        ("/bin/sh", "-c", "one\ntwo"), ("/bin/sh", "-c", "cat <<'X' >f\n$A\nX\n")]


@pytest.mark.parametrize(("line", "env"), [
    ("A=1 B='x y' C=\"$SPACE\" D=$SPACE", {"A": "1", "B": "x y", "C": "a b", "D": "a b"}),
    ("A one  two", {"A": "one  two"}),
    ("A='$SPACE' B=\\$SPACE C=${SPACE}c", {"A": "$SPACE", "B": "$SPACE", "C": "a bc"}),
    ("A=${NONE:-else} B=${SPACE:+set} C=${NONE:+set} D=$", {"A": "else", "B": "set", "C": "",
                                                          "D": "$"}),
    ("A=${NONE-x} B=${EMPTY-x} C=${EMPTY+y} D=${NONE+y} E=${EMPTY:-x}",
     {"A": "x", "B": "", "C": "y", "D": "", "E": "x"}),
    ("A=${NONE:-${SPACE}} B=${NONE-'x y'} C=${NONE:-}}", {"A": "a b", "B": "x y", "C": "}"}),
    ("PATH=/opt/bin:$PATH", {"PATH": "/opt/bin:/usr/bin"}), ("A=", {"A": ""})],
    ids=["pairs", "old-form", "quotes", "defaults", "set", "nested", "path", "empty"])
def test_variables_are_read_as_the_grammar_says(line: str, env: dict[str, str]) -> None:
    assert recipe(f"FROM x\nENV {line}", BASE).env == env


def test_arguments_hold_for_commands_and_not_afterwards() -> None:
    made = recipe("ARG OUTER=1\nFROM x\nARG A=2\nARG PATH\nENV B=$A\nRUN go", BASE)
    step = made.steps[0]
    assert isinstance(step, BuildCommand) and step.env == {"A": "2", "B": "2", "PATH": "/usr/bin"}
    assert made.env == {"B": "2"}


def test_directories_follow_each_other_and_users_hold() -> None:
    made = recipe("FROM x\nWORKDIR /a\nWORKDIR b\nUSER me:group\nRUN go\nWORKDIR ../c", {})
    assert made.steps == [
        BuildFolder("/a"), BuildFolder("/a/b"),
        BuildCommand(5, ("/bin/sh", "-c", "go"), "/a/b", {}, "me:group"), BuildFolder("/a/c")]
    assert (made.workdir, made.user) == ("/a/c", "me:group")


def test_the_first_directory_is_that_of_the_base_image() -> None:
    made = recipe("FROM x\nRUN go\nCOPY a .\nWORKDIR b", {}, "/testbed")
    assert made.steps == [
        BuildCommand(2, ("/bin/sh", "-c", "go"), "/testbed", {}, ""),
        BuildCopy(3, ("a",), "/testbed/", None), BuildFolder("/testbed/b")]


@pytest.mark.parametrize(("line", "step"), [
    ("COPY a b /c/", BuildCopy(3, ("a", "b"), "/c/", None)),
    ("COPY a .", BuildCopy(3, ("a",), "/w/", None)),
    ("COPY a name", BuildCopy(3, ("a",), "/w/name", None)),
    ("COPY . /", BuildCopy(3, (".",), "/", None)),
    ('ADD --chown=1:1 --chmod=0755 ["x y", "/z"]', BuildCopy(3, ("x y",), "/z", 0o755, "1:1")),
    ("COPY --chown=7 a /z", BuildCopy(3, ("a",), "/z", None, "7:7")),
    ("COPY --chown=me a /z", BuildCopy(3, ("a",), "/z", None, "me:"))],
    ids=["folder", "here", "name", "root", "list", "number", "user"])
def test_copies_have_sources_below_the_context_and_a_whole_target(line: str, step: BuildCopy
                                                                  ) -> None:
    assert recipe(f"FROM x\nWORKDIR /w\n{line}", {}).steps[1:] == [step]


@pytest.mark.parametrize("line", [
    "COPY --from=other /a /b", "ADD https://example.org/a /a", "ADD a.tar.gz /", "COPY ../a /a",
    "COPY a", "COPY <<X /a\nX", "RUN --mount=type=secret,id=k true", "ONBUILD RUN true",
    "SHELL bash", "ENV 1=2", "NOSUCH x",
    "ENV A=${B%y}", "USER ${B:?none}", "WORKDIR /${B", "ENV A=${1}"])
def test_what_no_session_can_do_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(InvalidInput, match=r"Dockerfile line 2: .*docker_image"):
        recipe(f"FROM x\n{line}", {})


def test_a_here_document_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidInput, match="line 2: the here-document X does not end"):
        recipe("FROM x\nRUN <<X\none", {})


@pytest.mark.parametrize(("text", "found"), [
    ("FROM x\nWORKDIR /a\nWORKDIR b", "/a/b"), ("FROM x", ""),
    ("FROM x AS y\nWORKDIR /a\nFROM z\nCOPY --from=y /a /a\nWORKDIR b", "/b")],
    ids=["one", "none", "stages"])
def test_the_working_directory_of_a_built_image_is_that_of_its_last_stage(
        text: str, found: str) -> None:
    assert working_directory(text) == found


def test_a_script_that_names_its_interpreter_is_run_by_it() -> None:
    (argv,) = run_lines("RUN <<EOF\n#!/usr/bin/env python3\nprint(6 * 7)\nEOF\n")
    told = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert told.stdout == "42\n"


def test_a_variable_of_the_image_is_stronger_than_an_argument() -> None:
    (step,) = (step for step in recipe("FROM x\nARG SPACE=c\nARG MINE=d\nRUN true", BASE).steps
               if isinstance(step, BuildCommand))
    assert dict(step.env) == {"SPACE": "a b", "MINE": "d"}


def test_a_quote_that_does_not_end_is_left_to_the_shell() -> None:
    assert run_lines("RUN <<'A\nRUN true") == [("/bin/sh", "-c", "<<'A"), ("/bin/sh", "-c", "true")]
