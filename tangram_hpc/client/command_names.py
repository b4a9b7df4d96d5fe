"""Guesses the name of a command that its caller did not name; it does no I/O.

The name is the action's class: run times are learned for each name, and accounting adds up by name.
The name is therefore that of the program which does the work: `pytest` for
`cd repo && SEED=17 timeout 60 python3 -m pytest -q`, and `run_N.py` for `python3 run_17.py` and
`python3 run_18.py` alike. The guess looks at the first command of the line that does more than
prepare. It reads no file and never fails; its cost is linear in the first LOOK characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from ..domain.class_names import template

LOOK = 2000  # characters of a shell line that are read
_SHORT = 400  # characters of a command given as words whose name is remembered
_DEPTH = 4  # how deeply shells that run shells are followed
# a redirection, a comment, arithmetic as a command, the output of other commands, a separator, a
# word with its quoted parts and its arithmetic, an unclosed quote
_TOKEN = re.compile(r"""(?P<away>[0-9]*>&[0-9-]|&>>?|[0-9]*(?:<<<|<<-?|<|>>|>\||>))
                    |(?P<comment>\#[^\n]*)
                    |(?P<sum>\(\([^()]{0,200}\)\))
                    |\$\((?P<inner>[^()]{1,200})\)
                    |(?P<end>&&|\|\||[;&|()\n])
                    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\(\([^()]{0,200}\)\)
                              |\$(?!\()|[^\s;&|()<>'"\\$])+)
                    |\S""", re.VERBOSE | re.DOTALL)
_KEYWORDS = frozenset(("then", "do", "if", "while", "until", "else", "elif", "{", "!"))
_NO_COMMAND = frozenset(("for", "case", "select", "function", "}", "fi", "done", "esac"))
_PREPARES = frozenset(("cd", "export", "set", "source", ".", "ulimit", "umask", "pushd", "popd",
                       "[", "[[", "test", "unset", "mkdir", "true", ":", "eval", "shopt", "trap"))
# Commands that run another command: the number of their own arguments in front of that command, and
# those of their options that take a value.
_WRAPPERS = {
    "env": (0, ("-u", "--unset", "-C", "--chdir")), "timeout": (1, ("-s", "--signal", "-k")),
    "nice": (0, ("-n",)), "sudo": (0, ("-u", "-g", "-C", "-D", "-h", "-p")),
    "time": (0, ("-f", "-o")), "exec": (0, ("-a",)), "nohup": (0, ()), "command": (0, ()),
    "setsid": (0, ()), "stdbuf": (0, ("-i", "-o", "-e")), "ionice": (0, ("-c", "-n")),
    "taskset": (1, ()), "numactl": (0, ("-C", "-N", "-m", "-i")),
}
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash"))
_INTERPRETER = re.compile(r"(python|pypy|node|ruby|perl|julia|Rscript|php|lua)[0-9.]*$")
_WITH_VALUE = frozenset(("-W", "-X", "-I", "-r", "--require"))  # options of interpreters
_INLINE = frozenset(("-c", "-e", "-E", "--eval", "-"))  # the program is in the line or on stdin
_RUNNERS = frozenset(("uv", "poetry", "pipenv"))  # `uv run COMMAND`
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")


def name_of(shell: str, argv: Sequence[str]) -> str:
    """Guesses the name of a command.

    Args:
        shell: a line for the shell; empty where the command is an argv.
        argv: the argv, where `shell` is empty; empty for an empty line.
    """
    if shell or not argv:
        return _name_of_line(shell[:LOOK])
    # names of short commands are cached, because such commands often come again
    if len(argv) < 9 and sum(map(len, argv)) < _SHORT:
        return _name_of_words(tuple(argv))
    return _name_of_words.__wrapped__(tuple(argv[:64]))


@lru_cache(maxsize=1024)
def _name_of_words(argv: tuple[str, ...]) -> str:
    return _of_words(list(argv), _DEPTH) or _last_part(argv[0])


@lru_cache(maxsize=1024)
def _name_of_line(line: str) -> str:
    return _of_line(line, _DEPTH) or "sh"


def _of_line(line: str, depth: int) -> str:
    """The name of the first command of a line that does more than prepare, else of its last."""
    name = ""
    for words in _commands(line):
        found = _of_words(words, depth)
        if found and found not in _PREPARES:
            return found
        name = found or name
    return name


def _commands(line: str) -> Iterator[list[str]]:
    """Yields the commands of a line as lists of words, without quotes and redirections. The line is
    read only as far as the caller asks, so a long script costs no more than its first commands."""
    words: list[str] = []
    away = False  # the next word is a redirection's file
    for token in _TOKEN.finditer(line):
        word = token["word"]
        if token["comment"] or token["sum"]:
            continue
        if token["inner"] and words and (words[0] in _PREPARES or words[0] in _NO_COMMAND):
            continue  # `cd $(git rev-parse --show-toplevel)` prepares as a whole
        if token["away"]:
            away = token["away"][-1] in "<>|"
        elif word is None:
            if words and words[0] not in _NO_COMMAND:
                yield words
            words = []
            yield from _commands(token["inner"] or "")
        elif away:
            away = False
        elif word in _KEYWORDS and not words:
            continue
        else:
            quoted = len(word) > 1 and word[0] in "'\"" and word[-1] == word[0]
            words.append(word[1:-1] if quoted else word)
    if words and words[0] not in _NO_COMMAND:
        yield words


def _of_words(words: list[str], depth: int) -> str:
    """Returns the name of one command; empty if it only sets variables or wraps no command."""
    while words:
        program = _last_part(words[0])
        if _ASSIGNMENT.match(words[0]):
            words = words[1:]
        elif program in _WRAPPERS:
            own, with_value = _WRAPPERS[program]
            words = _after_options(words[1:], with_value)[own:]
            if not words:
                return program
        elif program in _RUNNERS and words[1:2] == ["run"]:
            words = _after_options(words[2:], ())
        elif program in _SHELLS and depth:
            return _of_shell(words, program, depth)
        else:
            return _of_program(words, program)
    return ""


def _after_options(words: list[str], with_value: Sequence[str]) -> list[str]:
    """Returns the words after the leading options and their values."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in with_value else 1
    return words[at:]


def _of_shell(words: list[str], program: str, depth: int) -> str:
    """Returns a name for a call of a shell: that of the line that it runs (`-c`, `-lc`), else that
    of its script, else the shell's own.
    """
    for at, word in enumerate(words[1:], 2):
        if word.startswith("-") and not word.startswith("--") and "c" in word:
            found = _of_line("".join(words[at:at + 1])[:LOOK], depth - 1)
            if found == "$@":  # the line runs its arguments, which come after its `$0`
                found = _of_words(words[at + 2:], depth - 1)
            return found or program
        if not word.startswith(("-", "+")):
            return template(_last_part(word))
    return program


def _of_program(words: list[str], program: str) -> str:
    """Returns the name of an interpreter's module or script, else of the program. In the name of a
    file numbers are replaced; a program on the search path keeps its name (`bzip2`)."""
    matched = _INTERPRETER.match(program)
    if matched is None:
        path = words[0].rpartition("/")[0]
        return template(program) if path and not path.endswith("bin") else program
    at = 1
    while at < len(words) and words[at] not in _INLINE:
        word = words[at]
        if word == "-m" and at + 1 < len(words):
            return template(words[at + 1].partition(".")[0])
        if not word.startswith("-"):
            return template(_last_part(word))
        at += 2 if word in _WITH_VALUE else 1
    return matched[1]


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path
