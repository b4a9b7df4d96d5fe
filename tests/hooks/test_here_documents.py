"""Which here-documents a line of a Dockerfile begins; bash says the same."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.hooks.harness.dockerfile_steps import instructions, recipe
from tangram_hpc.hooks.harness.here_documents import here_documents

# parts of a line, each a word or more, and the delimiters of the here-documents in it
PARTS: dict[str, list[str]] = {
    "cat <<EOF": ["EOF"], "cat <<-EOF": ["EOF"], "cat << EOF": ["EOF"], "cat 3<<EOF": ["EOF"],
    "cat <<'A B'": ["A B"], 'cat <<"A"': ["A"], 'cat <<A"B C"': ["AB C"], "cat <<\\A": ["A"],
    "cat <<END-OF.1 >f": ["END-OF.1"], "cat <<A>f": ["A"], "cat <<A;": ["A"],
    "cat <<A <<B": ["A", "B"],
    "(cat <<A)": ["A"], "((cat <<A) ; b)": ["A"], "x=$(cat <<A)": ["A"], "a#b <<C": ["C"],
    "cat <<<EOF": [], "cat <<< EOF": [], "cat <<<'EOF' <<A": ["A"],
    "echo $((1<<x))": [], "echo $(( 1 << n ))": [], "echo $(( (1 <<n) + 2 )) <<A": ["A"],
    "((x = 1 <<n))": [], "for ((i = 1; i <<n; i++)); do :; done": [],
    "echo '<<A'": [], 'echo "a <<A"': [], 'echo "a\\" <<A"': [], "echo \\<<A": [],
    "echo ${a:- <<A}": [], "echo 'a' \"b\" <<C": ["C"], "echo \\' <<A": ["A"],
}


def delimiters(line: str) -> list[str]:
    return [found.delimiter for found in here_documents(line)]


@pytest.mark.parametrize("line", [*PARTS, "echo # <<A", "let x=1<<2"])
def test_only_real_here_documents_are_found(line: str) -> None:
    assert delimiters(line) == PARTS.get(line, [])


@pytest.mark.skipif(not shutil.which("bash"), reason="bash says what is real")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(list(PARTS)), min_size=1, max_size=5),
       st.sampled_from([" ; ", " && ", " | "]), st.sampled_from(["", " # <<X"]))
def test_bash_finds_the_same_here_documents(parts: list[str], between: str, after: str) -> None:
    line = between.join(part.rstrip(";") for part in parts) + after
    told = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
    assert sorted(delimiters(line)) == sorted(re.findall(r"\(wanted `(.*)'\)", told.stderr))


def test_lines_after_a_shift_or_a_here_string_are_instructions() -> None:
    text = "FROM x\nRUN cat <<<word\nRUN echo $((1 << n))\nRUN [\"sh\", \"-c\", \"cat <<X\"]\n"
    assert [each.word for each in instructions(text)] == ["FROM", "RUN", "RUN", "RUN"]


def test_a_here_document_ends_at_its_delimiter_alone() -> None:
    made = recipe("FROM x\nRUN <<EOF\n EOF\nEOF \n\ta\nEOF\nRUN <<-'E F'\n\ta\n\tE F\n", {})
    assert [step.argv[-1] for step in made.steps] == [  # type: ignore[union-attr]
        " EOF\nEOF \n\ta", "a"]
