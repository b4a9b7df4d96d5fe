"""Reads a Dockerfile of one stage as a list of steps that a session can do.

A session whose image is that of `FROM` can write its root, so the rest of a simple Dockerfile can
be carried out in it: run the commands, copy the files, set the variables. This needs no builder and
no root. Instructions that a session cannot carry out are refused, with their line: several stages,
files from other images or URLs, secrets of a build. This module only reads text;
`dockerfile_replay` carries out the steps.

The grammar is the published one (Dockerfile reference): `#` comments, lines continued by `\\`,
here-documents of RUN, `$NAME`, `${NAME}`, `${NAME:-x}`, `${NAME-x}`, `${NAME:+x}` and `${NAME+x}`
in ENV, ARG, WORKDIR, COPY, ADD, USER and FROM; other forms of `${...}` are refused. RUN leaves
variables to the shell.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tangram_hpc.errors import InvalidInput

from .here_documents import here_documents

_IGNORED = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL",
            "VOLUME"}
# runs a script that names its interpreter
_RUN_SCRIPT = ("/bin/sh", "-c", 'f=$(mktemp) && printf %s "$1" >"$f" && chmod +x "$f" || exit 126; '
               '"$f"; c=$?; rm -f "$f"; exit $c', "sh")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"([A-Za-z_]\w*)(?:(:?)([-+])(.*))?", re.DOTALL)  # between ${ and }
_REMEDY = "build the image elsewhere and name it as the task's docker_image"


@dataclass(frozen=True)
class BuildCommand:
    """A command of the Dockerfile.

    Attributes:
        line: the line in which its instruction begins, from 1.
        argv: the argv of the command.
        cwd: its working directory.
        env: its variables, without those of the base image.
        user: its user, with or without ":group"; empty for the image's own.
    """

    line: int
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    user: str


@dataclass(frozen=True)
class BuildCopy:
    """Files of the build context that are copied.

    Attributes:
        line: the line in which its instruction begins, from 1.
        sources: paths and patterns below the context.
        target: the target as an absolute path; a folder if it ends in "/".
        mode: the permission bits that all files get; None if they keep their own.
        owner: "user:group" to which the files shall belong, as `chown` takes it; empty for nobody
            in particular.
    """

    line: int
    sources: tuple[str, ...]
    target: str
    mode: int | None
    owner: str = ""


@dataclass(frozen=True)
class BuildFolder:
    """A working directory, which is made if it is not there.

    Attributes:
        path: absolute.
    """

    path: str


@dataclass
class Recipe:
    """The steps of a Dockerfile, and the state after them.

    Attributes:
        steps: the steps in their order.
        env: the variables after the last step, without those of the base image.
        workdir: the working directory after the last step.
        user: the user after the last step, with or without ":group"; empty for the image's own.
    """

    steps: list[BuildCommand | BuildCopy | BuildFolder] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        line: the line in which it begins, from 1.
        word: its name in capitals, such as RUN.
        text: the rest of the instruction, with continued lines joined.
        heredoc: the lines of its here-documents, the closing delimiters included; empty for none.
    """

    line: int
    word: str
    text: str
    heredoc: str = ""


def instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a Dockerfile in their order.

    Raises:
        InvalidInput: a here-document does not end.
    """
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first = at
        parts: list[str] = []
        while at < len(lines):
            line = lines[at]
            at += 1
            if not line.strip() or line.lstrip().startswith("#"):
                if parts:
                    continue  # skip comments and empty lines between continued lines
                break
            parts.append(line.rstrip()[:-1] if line.rstrip().endswith("\\") else line)
            if not line.rstrip().endswith("\\"):
                break
        if not parts:
            continue
        word, rest = _first("\n".join(parts).strip().replace("\n", " "))
        body: list[str] = []
        for document in (here_documents(rest) if word.upper() in ("RUN", "COPY", "ADD") else ()):
            begun = at
            while at < len(lines) and not document.ends_with(lines[at]):
                at += 1
            if at == len(lines):
                raise InvalidInput(f"Dockerfile line {first + 1}: the here-document "
                                   f"{document.delimiter} does not end")
            at += 1
            body += lines[begun:at]
        yield Instruction(first + 1, word.upper(), rest.strip(), "\n".join(body))


def base_image(text: str) -> str:
    """Returns the image of FROM.

    Raises:
        InvalidInput: there is no FROM, its image is `scratch`, there are several stages, or a
            variable has a form that is not supported.
    """
    args: dict[str, str] = {}
    image = ""
    for each in instructions(text):
        if each.word == "ARG" and not image:
            args.update(_assigned(each, args))
        elif each.word == "FROM":
            if image:
                raise _refused(each, "a second stage")
            words = [word for word in each.text.split() if not word.startswith("--")]
            image = "".join(_words(each, words[0], args)) if words else ""
    if image in ("", "scratch"):
        raise InvalidInput(f"Dockerfile: FROM names {image or 'no image'!r}; name an image with a "
                           "shell")
    return image


def recipe(text: str, base_env: Mapping[str, str], base_workdir: str = "/") -> Recipe:
    """Reads the steps after FROM.

    Args:
        text: the Dockerfile.
        base_env: the variables of the base image.
        base_workdir: its working directory.

    Returns:
        The steps, and the state after them.

    Raises:
        InvalidInput: an instruction cannot be carried out in a session; the message names its line
            and the remedy.
    """
    made = Recipe(workdir=base_workdir)
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    args: dict[str, str] = {}
    begun = False
    for each in instructions(text):
        known = {**args, **base_env, **made.env}
        if not begun:
            begun = each.word == "FROM"
        elif each.word == "ARG":
            args.update(_assigned(each, known))
        elif each.word == "ENV":
            made.env.update(_assigned(each, known))
        elif each.word == "WORKDIR":
            made.workdir = posixpath.normpath(
                posixpath.join(made.workdir, "".join(_words(each, each.text, known))))
            made.steps.append(BuildFolder(made.workdir))
        elif each.word == "USER":
            made.user = "".join(_words(each, each.text, known))
        elif each.word == "SHELL":
            shell = tuple(_listed(each.text) or ())
            if not shell:
                raise _refused(each, "a text that is not a JSON list of words")
        elif each.word == "RUN":
            # a variable of the image is stronger than an ARG of the same name
            own = {name: base_env.get(name, value) for name, value in args.items()}
            made.steps.append(BuildCommand(each.line, _command(each, shell), made.workdir,
                                           {**own, **made.env}, made.user))
        elif each.word in ("COPY", "ADD"):
            made.steps.append(_copied(each, known, made.workdir))
        elif each.word not in _IGNORED:
            raise _refused(each, "any arguments")
    return made


def working_directory(text: str) -> str:
    """Returns the working directory that a Dockerfile gives its last stage; empty if it names none.

    This is for an image that was built from the Dockerfile elsewhere, so instructions that a
    session could not carry out are no error.

    Raises:
        InvalidInput: a variable of a WORKDIR has a form that is not supported.
    """
    found = ""
    for each in instructions(text):
        if each.word == "FROM":
            found = ""
        elif each.word == "WORKDIR":
            found = posixpath.normpath(
                posixpath.join(found or "/", "".join(_words(each, each.text, {}))))
    return found


def _command(each: Instruction, shell: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the argv of a RUN."""
    text = each.text
    while text.startswith("--"):
        flag, text = _first(text)
        if not (flag.startswith("--mount=") and "type=cache" in flag):  # a cache only saves time
            raise _refused(each, flag)
    if (argv := _listed(text)) is not None:
        return tuple(argv)
    if not each.heredoc:
        return (*shell, text)
    first = next(here_documents(text), None)
    if first is not None and (first.start, first.end) == (0, len(text)):
        # the lines are the script itself
        lines = each.heredoc.split("\n")[:-1]
        script = "\n".join(line.lstrip("\t") if first.tabs else line for line in lines)
        return ((*_RUN_SCRIPT, script + "\n") if script.startswith("#!") else (*shell, script))
    return (*shell, f"{text}\n{each.heredoc}\n")


def _copied(each: Instruction, known: Mapping[str, str], workdir: str) -> BuildCopy:
    if each.heredoc:
        raise _refused(each, "a here-document")
    text, mode, owner = each.text, None, ""
    while text.startswith("--"):
        flag, text = _first(text)
        name, _, value = flag.partition("=")
        if name == "--chmod" and re.fullmatch("0?[0-7]{3}", value):
            mode = int(value, 8)
        elif name == "--chown":
            owner = _owner("".join(_words(each, value, known)))
        elif name != "--link":
            raise _refused(each, flag)
    listed = _listed(text)
    words = ([word for text in listed for word in _words(each, text, known, split=False)] if listed
             else _words(each, text, known))
    if len(words) < 2:
        raise _refused(each, "fewer than two paths")
    *sources, target = words
    for source in sources:
        if "://" in source or ".." in source.split("/"):
            raise _refused(each, source)
        if each.word == "ADD" and re.search(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", source):
            raise _refused(each, f"the archive {source}, which it would unpack,")
    folder = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    whole = posixpath.normpath(posixpath.join(workdir, target))
    return BuildCopy(each.line, tuple(sources), whole.rstrip("/") + "/" if folder else whole, mode,
                     owner)


def _owner(told: str) -> str:
    """Returns the value of --chown as `chown` takes it. As Docker does, a user without a group
    means the user's own group, and a number means the group of the same number too."""
    if not told or ":" in told:
        return told
    return f"{told}:{told}" if told.isdecimal() else f"{told}:"


def _assigned(each: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an ENV or ARG."""
    words = _words(each, each.text, known)
    if each.word == "ENV" and words and "=" not in words[0]:  # the old form: ENV NAME value
        name, value = _first(each.text)
        return {name: "".join(_words(each, value, known, split=False))}
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise _refused(each, word)
        if equals:
            found[name] = value
        elif name in known:
            found[name] = known[name]
    return found


def _first(text: str) -> tuple[str, str]:
    """Returns the first word of a text, and what follows it; any white space separates them."""
    word, *rest = text.split(maxsplit=1) or [""]
    return word, rest[0].strip() if rest else ""


def _words(each: Instruction, text: str, known: Mapping[str, str], split: bool = True
           ) -> list[str]:
    """Splits a text of an instruction into words, without their quotes and with their variables
    replaced."""
    words, word, quote, at, begun = [], "", "", 0, False
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\" and quote != "'" and at < len(text):
            word, at, begun = word + text[at], at + 1, True
        elif quote and char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote, begun = char, True
        elif char == "$" and quote != "'":
            value, at = _variable(each, text, at, known)
            word, begun = word + value, True
        elif split and not quote and char.isspace():
            if begun:
                words.append(word)
            word, begun = "", False
        else:
            word, begun = word + char, True
    return [*words, word] if begun else words


def _variable(each: Instruction, text: str, at: int, known: Mapping[str, str]) -> tuple[str, int]:
    """Returns the value of the variable whose name begins at position `at`, and the position after
    it."""
    if not text.startswith("{", at):
        found = _NAME.match(text, at)
        return (known.get(found[0], ""), found.end()) if found else ("$", at)
    end = _end_of_braces(text, at)
    form = _BRACED.fullmatch(text, at + 1, end - 1)
    if form is None or not end:
        raise _refused(each, f"${text[at:end or None]}")
    name, colon, sign, word = form.groups()
    value = known.get(name, "")
    there = bool(value) if colon else name in known
    if sign and there == (sign == "+"):
        value = "".join(_words(each, word, known, split=False))
    elif sign == "+":
        value = ""
    return value, end


def _end_of_braces(text: str, start: int) -> int:
    """Returns the position after the brace that closes the one at `start`; 0 if none does."""
    depth = 0
    for found in re.finditer(r"\\.|\$\{|\{|\}", text[start:]):
        if found[0] == "}":
            depth -= 1
        elif found[0] == "${" or not depth:
            depth += 1
        if not depth:
            return start + found.end()
    return 0


def _listed(text: str) -> list[str] | None:
    """Returns the words of a JSON list; None if the text is anything else."""
    try:
        words = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return words
    return None


def _refused(each: Instruction, what: str) -> InvalidInput:
    return InvalidInput(f"Dockerfile line {each.line}: {each.word} with {what} cannot be done in a "
                        f"session; {_REMEDY}")
