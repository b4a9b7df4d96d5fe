"""`tangram template`: lists, shows, fills in and checks the batch scripts that come with the
package.

Text goes in and text comes out; Slurm is not called. The head of a template documents each key in a
line `#: key=default  about`; in the script the key stands as `<KEY>`. A directive whose optional
key is empty is dropped, and keys without a value are reported. Text that several templates share
lies in a file `_PART.sh`. A line `#+ PART` includes that file, so a template is always shown and
rendered whole. A line `#! key=value: about` is a caution, which is printed when the key has this
value.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..scheduler.placement.placers.placer_name import parse_placer_name
from .helpers.installed_files import installed_folder
from .helpers.times import time_limit

_ABOUT = re.compile(r"^#: [a-z-]+: (.+)$", re.MULTILINE)
_KEY = re.compile(r"^#: ([a-z_]+)(=(\S*))?\s+(\S.*)$", re.MULTILINE)
_PART = re.compile(r"^#\+ ([a-z_]+)\n", re.MULTILINE)
_CAUTION = re.compile(r"^#! ([a-z_]+)=(\S+): (.+)$", re.MULTILINE)
_OPEN = re.compile(r"<([A-Z][A-Z_]+)>")
# Placeholders whose values follow from keys; see `Template.values`.
_COMPUTED = frozenset({"<TASKS_TRAINER>", "<TASKS_NODE>", "<RANKS_NODE>", "<CPUS_NODE>"})
# Keys whose values are whole numbers of at least 1.
_COUNT = re.compile(r"(nodes|cpus|ranks|satellites|virtual_cpus|threads)(_|$)")
# Values of `_SHELL` are shell text and are not checked. Values of `_MORE` are several arguments,
# each of which is quoted. Every other value must be one argument of a directive or a command.
_SHELL = ("setup", "trainer")
_MORE = ("broker_options", "more")
# Paths and an image in double quotes: a space, $NAME and ${NAME:-...} are allowed, but no command
# substitution.
_QUOTED = ("scratch", "workload", "config", "container_image")
_WORD_BAD = re.compile(r"[\s'\"`#$&;|<>\\(){}\[\]*?!~^]")
_QUOTED_BAD = re.compile(r"['\"`\\$]|[^\S ]")
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(:-[^${}'\"`\\]*)?\}")
_EARLY_S = 60  # Slurm looks for warnings that are due about once in a minute
_WHOLE = ("requeues", "warn", "wait_s")  # whole numbers of at least 0
_CHOICES = {"gateway": ("on", "off"), "launcher": ("none", "torchrun", "ray"),
            "container": ("apptainer", "pyxis")}
_PLACER = ("placer", "policy")
_NO_LIMIT = ("infinite", "unlimited")  # in any case of letters
# Slurm's own MPI plugins; `srun --mpi=list` may name others that a site has.
_MPI = re.compile(r"none|pmi2|pmix(_v\d+)?|openmpi|cray_shasta")


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("template", help="list, show, fill in or check batch scripts")
    p.set_defaults(go=lambda args: args.act(args))
    acts = p.add_subparsers(metavar="ACT", required=True)
    listing = acts.add_parser("list", help="list the templates, one per line")
    listing.set_defaults(act=_list)
    show = acts.add_parser("show", help="print a template; its head documents its keys")
    show.add_argument("name", help="name of the template")
    show.set_defaults(act=_show)
    fill = acts.add_parser("render", help="print a template with its keys filled in")
    fill.add_argument("name", help="name of the template")
    fill.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE",
                      help="value of a key; KEY= drops the directive of an optional key")
    fill.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: stdout)")
    fill.add_argument("--strict", action="store_true",
                      help="fail if a key has neither a value nor a default")
    fill.set_defaults(act=_render)
    check = acts.add_parser("check", help="check that a script has no placeholders left, and that "
                                          "its job steps fit on a node together (else status 2)")
    check.add_argument("file", type=Path, help="the script")
    check.add_argument("--threads-per-core", type=int, default=0, metavar="N",
                       help="CPUs of a core of the nodes, as printed by `sinfo -o %%Z` (default: "
                            "the number in the script)")
    check.set_defaults(act=_check)


@dataclass(frozen=True)
class TemplateKey:
    """A key of a template.

    Attributes:
        default: Its default value; None if the user must give a value.
        optional: Whether its value may be empty.
    """

    default: str | None
    optional: bool


@dataclass(frozen=True)
class Template:
    """A batch script with keys to be filled in.

    Attributes:
        name: Its name.
        text: Its whole text.
        about: Its description, from the first line of its head.
        keys: Its keys by name.
    """

    name: str
    text: str
    about: str
    keys: Mapping[str, TemplateKey]

    def values(self, given: Mapping[str, str]) -> dict[str, str | None]:
        """Returns the value of each placeholder, including those that are computed from others."""
        values = {name: _text(name, given[name]) if name in given else key.default
                  for name, key in self.keys.items()}
        if values.get("launcher", "none") != "none":  # one task a node, without MPI
            nodes_given = values.get("nodes_trainer") or values.get("nodes") or "1"
            values |= {"gateway": "off", "mpi": "none", "ranks": nodes_given}
        if ranks := values.get("ranks"):
            tasks = int(ranks) + (values["gateway"] != "off")
            nodes = int(values.get("nodes_trainer") or values.get("nodes") or 1)
            each = -(-tasks // nodes)
            values |= {"tasks_trainer": str(tasks), "tasks_node": str(each),
                       "ranks_node": str(-(-int(ranks) // nodes))}
            if lent := values.get("cpus_lent"):
                core, cpus = int(values["threads_per_core"] or 1), int(values["cpus_per_rank"] or 1)
                values["cpus_node"] = str(step_cpus(1, int(lent), core)
                                          + step_cpus(each, cpus, core))
        return values

    def cautions(self, given: Mapping[str, str]) -> list[str]:
        """Returns warnings about values that are allowed but seldom meant."""
        values = self.values(given)
        found = [f"template {self.name}: {m[1]}={m[2]}: {m[3]}"
                 for m in _CAUTION.finditer(self.text) if values.get(m[1]) == m[2]]
        mpi = values.get("mpi") or "none"
        if not _MPI.fullmatch(mpi):
            found.append(f"template {self.name}: mpi={mpi}: this is none of Slurm's own MPI "
                         "plugins, such as pmi2 or pmix; unless `srun --mpi=list` shows it, no "
                         "rank can start")
        limit, warn = values.get("time") or "", values.get("warn") or "0"
        has_s = _job_seconds(limit)
        if has_s and int(warn) and has_s <= int(warn) + _EARLY_S:
            found.append(f"template {self.name}: time={limit}: the job begins to end warn={warn} s "
                         "before this limit, and Slurm may warn it a minute earlier, so no time is "
                         "left for its work")
        return found


def _job_seconds(limit: str) -> float | None:
    """Returns the time limit that sbatch reads: 0 is none; None for a word or what it refuses."""
    try:
        return time_limit(f"{limit}:0" if limit.isdecimal() else limit)  # alone it is minutes
    except argparse.ArgumentTypeError:
        return None


# ---- CPUs and cores ----------------------------------------------------------------------------


def step_cpus(tasks: int, cpus: int, core: int) -> int:
    """Returns how many CPUs a job step with `--exact` holds on a node with `core` CPUs per core.

    A job step holds whole cores. Tasks of one CPU share cores, and other tasks do not (observed on
    Slurm 22.05).
    """
    if cpus == 1:
        return -(-tasks // core) * core
    return tasks * -(-cpus // core) * core


_SIZES = re.compile(r"^lent_cpus=(\d+) node_ranks=(\d+) rank_cpus=(\d+)", re.MULTILINE)
_CORE = re.compile(r"^core=(\d+)", re.MULTILINE)
_NODE = re.compile(r"^#SBATCH --cpus-per-task=(\d+)", re.MULTILINE)


def too_wide(text: str, core: int = 0) -> str:
    """Explains why the two job steps that share each node of a script's job do not fit on a node.

    Args:
        text: The script.
        core: CPUs per core; 0 for the number in the script.

    Returns:
        The reason; empty if the job steps fit, or if no job steps share a node.
    """
    sizes, node, said = _SIZES.search(text), _NODE.search(text), _CORE.search(text)
    if sizes is None or node is None:
        return ""
    core = core or int(said[1] if said else 1) or 1
    lent, ranks, cpus = (int(number) for number in sizes.groups())
    wide, held = step_cpus(1, lent, core), step_cpus(ranks, cpus, core)
    if wide + held <= step_cpus(1, int(node[1]), core):  # a job holds whole cores as well
        return ""
    return (f"a job step holds whole cores; with {core} CPUs per core the {lent} CPUs to lend take "
            f"{wide} CPUs and the {ranks * cpus} CPUs of the ranks take {held}, which is more than "
            f"the job's {node[1]} on each node; render it with `-o threads_per_core={core}`, or "
            "with other sizes")


# ---- finding ---------------------------------------------------------------------------------


def folder() -> Path:
    """Returns the folder of the templates: beside the package in a checkout, else where pip put
    them.

    Raises:
        InvalidInput: The templates are not installed.
    """
    return installed_folder("sbatch_templates", "templates")


def load(name: str) -> Template:
    """Returns a template by its name.

    Raises:
        InvalidInput: There is no such template; the message names all templates.
    """
    paths = {path.stem: path for path in folder().glob("*.sbatch")}
    if name not in paths:
        raise InvalidInput(f"template: {name!r} is not known; known are "
                           f"{', '.join(sorted(paths))}")

    def part(match: re.Match[str]) -> str:
        return (folder() / f"_{match[1]}.sh").read_text()

    text = _PART.sub(part, paths[name].read_text()).replace("<TEMPLATE>", name)
    about = _ABOUT.search(text)
    keys = {m[1]: TemplateKey(m[3] if m[2] else None, m[4].startswith("(optional)"))
            for m in _KEY.finditer(text)}
    return Template(name, text, about[1] if about else "", keys)


# ---- filling in --------------------------------------------------------------------------------


def render(template: Template, given: Mapping[str, str]) -> str:
    """Returns the template filled in; keys without a value stay placeholders.

    Raises:
        InvalidInput: The template has no such key, or a value is not allowed.
    """
    for key, value in given.items():
        _check_option(template, key, value)
    _check_launcher(template, given)
    values = template.values(given)
    lines = []
    for line in template.text.splitlines(keepends=True):
        dropped = any(values.get(k.lower()) == "" for k in _OPEN.findall(line))
        if not (dropped and line.startswith("#SBATCH")):
            lines.append(_OPEN.sub(lambda m: _filled(m, values), line))
    return "".join(lines)


def _check_option(template: Template, key: str, value: str) -> None:
    if key not in template.keys:
        near = difflib.get_close_matches(key, template.keys, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"`tangram template show {template.name}`"
        raise InvalidInput(f"--option: {key!r} is not a key of {template.name}; {hint}")
    if not value.strip() and not template.keys[key].optional:
        raise InvalidInput(f"--option: key {key} is not optional; give it a value")
    _check_quoting(key, value)
    if key == "job_name" and "/" in value:
        raise InvalidInput(f"--option: job_name={value!r}: its value must not contain '/', as it "
                           "is part of the name of the job's output file")
    if _COUNT.match(key) and not (value.isdecimal() and int(value)):
        raise InvalidInput(f"--option: {key}={value!r} must be a whole number of at least 1")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise InvalidInput(f"--option: {key}={value!r} must be {' or '.join(_CHOICES[key])}")
    if key in _WHOLE and not value.isdecimal():
        raise InvalidInput(f"--option: {key}={value!r} must be a whole number of at least 0")
    if key == "broker" and not (value.isdecimal() and int(value)):
        raise InvalidInput(f"--option: broker={value!r} must be the number of the broker's job, as "
                           "`sbatch --parsable` prints it")
    if key == "time" and value.lower() not in _NO_LIMIT and (
            "." in value or _job_seconds(value) is None):
        raise InvalidInput(f"--option: time={value!r} is no time limit of Slurm; write MINUTES, "
                           "MIN:SEC, H:MIN:SEC, DAYS-H, DAYS-H:MIN or DAYS-H:MIN:SEC")
    if key in _PLACER:
        try:
            parse_placer_name(value)
        except InvalidInput as error:
            raise InvalidInput(f"--option: {key}={value!r}: {error}") from None


def _check_launcher(template: Template, given: Mapping[str, str]) -> None:
    """Refuses values that contradict a launcher."""
    launcher = given.get("launcher", "none")
    if launcher == "none":
        return
    meant = template.values(given)
    for key in ("ranks", "gateway", "mpi"):
        if given.get(key, meant[key]) != meant[key]:
            raise InvalidInput(f"--option: {key}={given[key]!r}: with launcher={launcher} it is "
                               f"{meant[key]}, as one task starts the trainer on each node; leave "
                               "it out")


def _check_quoting(key: str, value: str) -> None:
    """Refuses a value that the shell or sbatch would not take as one argument.

    Such a value could add an argument, a command or a directive, or end the quotes around it.
    """
    if key in _SHELL:
        return
    if key in _MORE:
        try:
            shlex.split(value)
        except ValueError as error:
            raise InvalidInput(f"--option: {key}={value!r}: {error}") from None
    rest, bad = value, _WORD_BAD
    if key in _QUOTED:
        bad = _QUOTED_BAD
        while (shorter := _VARIABLE.sub("", rest)) != rest:  # nested variables from the inside out
            rest = shorter
    found = None if key in _MORE else bad.search(rest)
    control = next((c for c in value if not c.isprintable()), None)
    if found or control:
        what = control or (found[0] if found else "")
        raise InvalidInput(f"--option: {key}={value!r}: its value must not contain {what!r}")


def _text(key: str, value: str) -> str:
    """Returns a checked value as it is written in a script.

    A whole number loses its leading zeros, with which bash would read it as an octal number.
    """
    if (_COUNT.match(key) or key in _WHOLE) and value.isdecimal():
        return str(int(value))
    return shlex.join(shlex.split(value)) if key in _MORE else value


def _filled(match: re.Match[str], values: Mapping[str, str | None]) -> str:
    value = values.get(match[1].lower())
    return match[0] if value is None else value


def left_open(text: str) -> list[str]:
    """Returns the placeholders in a script's directives and commands, but not in its comments.

    In a script that documents its keys, only a key's name is a placeholder. A trainer's command may
    hold other words of this form, such as `<EOS>`.
    """
    keys = {f"<{m[1].upper()}>" for m in _KEY.finditer(text)}
    live = [line for line in text.splitlines()
            if not line.startswith("#") or line.startswith("#SBATCH")]
    found = {m[0] for line in live for m in _OPEN.finditer(line)}
    return sorted(found & (keys | _COMPUTED) if keys else found)


# ---- the acts ----------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    for path in sorted(folder().glob("*.sbatch")):
        print(f"{path.stem:<16} {load(path.stem).about}")
    return 0


def _show(args: argparse.Namespace) -> int:
    sys.stdout.write(load(args.name).text)
    return 0


def _render(args: argparse.Namespace) -> int:
    given = {}
    for option in args.option:
        key, equals, value = option.partition("=")
        if not equals:
            raise InvalidInput(f"--option: {option!r} must have the form KEY=VALUE")
        given[key] = value
    template = load(args.name)
    text = render(template, given)
    still = left_open(text)
    open_keys = (f"template {args.name}: still to be filled in: {', '.join(still)}; give each key "
                 "with -o KEY=VALUE, its name in lower case")
    if still and args.strict:
        raise InvalidInput(open_keys)
    if args.output is None:
        sys.stdout.write(text)
    else:
        _write(args.output, text)
    for caution in (*([open_keys] if still else ()), *template.cautions(given)):
        print(f"tangram: warning: {caution}", file=sys.stderr)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InvalidInput(f"--output {path}: {error.strerror}") from None


def _check(args: argparse.Namespace) -> int:
    if args.threads_per_core < 0:
        raise InvalidInput(f"--threads-per-core {args.threads_per_core}: it is a number of CPUs, "
                           "which `sinfo -o %Z` prints; leave it out to take the script's")
    try:
        text = args.file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InvalidInput(f"script {args.file}: {why}") from None
    still = left_open(text)
    if still:
        raise InvalidInput(f"script {args.file}: placeholders are not filled in: "
                           f"{', '.join(still)}; give their values with `tangram template render "
                           "-o KEY=VALUE`")
    if why := too_wide(text, args.threads_per_core):
        raise InvalidInput(f"script {args.file}: {why}")
    if not args.threads_per_core and (why := too_wide(text, 2)):
        print(f"tangram: warning: script {args.file}: on nodes with hyperthreads it would lend "
              f"fewer CPUs: {why}", file=sys.stderr)
    return 0
