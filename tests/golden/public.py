"""Listed: public names with their parameters, settings, options, template keys, environment.

Each listing is flat: a spelling that users type, and what is true of it. The old spellings of
renamed entries are proved to work by `aliases`.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import importlib
import inspect
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import walk, where
from .renames import Renames
from .wire import shown

_ENV_NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|HOME|PATH|TMPDIR|USER")
_OURS = re.compile(r"\bTANGRAM_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
_TEMPLATE_KEY = re.compile(r"^#: ([a-z_]+)(=(\S*))?\s+(\S.*)$", re.MULTILINE)


# ---- names --------------------------------------------------------------------------------------


def names() -> dict[str, str]:
    """The package's face with its classes' members, and the public modules."""
    face = importlib.import_module(where.PACKAGE)
    found: dict[str, str] = {}
    for name in face.__all__:
        if name != "__version__":
            found.update(_object(f"{where.PACKAGE}.{name}", name, getattr(face, name)))
    found[f"{where.PACKAGE}.__version__"] = found[f"{where.PACKAGE}.comm"] = "value"
    for module in where.PUBLIC_MODULES:
        path = walk.file_of(module)
        if path is not None:
            found[module] = "module"
            found.update(_module(module, ast.parse(path.read_text())))
    return dict(sorted(found.items()))


def _object(place: str, name: str, value: Any) -> dict[str, str]:
    if not inspect.isclass(value):
        return {place: "function"} | _parameters(place, value)
    bases = sorted(b.__name__ for b in value.__mro__[1:-1]
                   if b.__module__ == "builtins" or hasattr(
                       importlib.import_module(where.PACKAGE), b.__name__))
    found = {place: "class" + (f" of {', '.join(bases)}" if bases else "")}
    if issubclass(value, enum.Enum):
        return found | {f"{place}.{m.name}": repr(m.value) for m in value}
    if name not in where.NOT_MADE_BY_USERS:
        found |= _parameters(place, value)
    for member in sorted(_members(value)):
        static = inspect.getattr_static(value, member, None)
        inner = f"{place}.{member}"
        if callable(getattr(value, member, None)) and not inspect.isclass(static):
            found |= {inner: "method"} | _parameters(inner, getattr(value, member))
        else:
            found[inner] = "attribute"
    return found


def _members(kind: type) -> set[str]:
    """Public members of a class and of its bases of this package; fields that are set when it is
    made count."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] != where.PACKAGE:
            continue
        names = [*vars(base), *vars(base).get("__annotations__", {}), *_set_when_made(base),
                 *getattr(base, "__struct_fields__", ())]
        found |= {n for n in names if not n.startswith("_")}
    return found


def _set_when_made(kind: type) -> Iterator[str]:
    """The attributes that a class's own `__init__` sets."""
    made = vars(kind).get("__init__")
    if inspect.isfunction(made) and Path(made.__code__.co_filename).is_file():  # not generated
        source = textwrap.dedent(inspect.getsource(made))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and (
                    isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.attr


def _parameters(place: str, value: Any) -> dict[str, str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return {}
    found = {}
    for p in parameters:
        if p.name in ("self", "cls"):
            continue
        kind = {p.KEYWORD_ONLY: "keyword", p.VAR_POSITIONAL: "all positional",
                p.VAR_KEYWORD: "all keywords"}.get(p.kind, "positional or keyword")
        default = "" if p.default is p.empty else f" = {_literal(p.default)}"
        found[f"{place}({p.name})"] = kind + default
    return found


def _literal(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    plain = (int, float, str, bytes, tuple, list, dict, type(None))
    return repr(value) if isinstance(value, plain) else "..."


def _module(module: str, tree: ast.Module) -> dict[str, str]:
    """Names that a module defines, with parameters, and what its `__all__` passes on from others;
    read from its source."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            found |= {f"{module}.{each}": "name" for each in ast.literal_eval(node.value)}
        name = getattr(node, "name", "_")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not name.startswith("_"):
            found[f"{module}.{name}"] = "function"
            found |= _read_parameters(f"{module}.{name}", node.args)
        elif isinstance(node, ast.ClassDef) and not name.startswith("_"):
            found[f"{module}.{name}"] = "class"
    return found


def _read_parameters(place: str, args: ast.arguments) -> dict[str, str]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    pairs = [(a, d, "positional or keyword") for a, d in zip(positional, defaults, strict=True)]
    pairs += [(a, d, "keyword") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return {f"{place}({a.arg})": kind + (f" = {_read_literal(d)}" if d is not None else "")
            for a, d, kind in pairs}


def _read_literal(node: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return "..."


# ---- settings -----------------------------------------------------------------------------------


def settings(renames: Renames) -> dict[str, str]:
    """Every key of the files that people write: type, bounds and default."""
    found = {}
    for label, place in where.SETTINGS.items():
        for key, field in where.resolve(place).model_fields.items():
            default = "required" if field.is_required() else f"= {_default(field)}"
            bounds = "".join(f", {b}" for b in _bounds(field.metadata))
            found[f"{label} {field.alias or key}"] = (
                f"{shown(field.annotation, renames)}{bounds}, {default}")
    return dict(sorted(found.items()))


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if hasattr(type(value), "model_fields"):
        return "its own defaults"
    return repr(value.value if isinstance(value, enum.Enum) else value)


def _bounds(metadata: Any) -> list[str]:
    """Bounds of a field, whatever pydantic's version wraps them in."""
    found = []
    for each in metadata:
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern",
                     "multiple_of", "allow_inf_nan"):
            value = getattr(each, name, None)
            if value is not None:
                found.append(f"{name} {value!r}")
    return sorted(set(found))


# ---- verbs, options, templates ------------------------------------------------------------------


def options() -> dict[str, Any]:
    """Every verb and option of the command line, and every key of the templates."""
    found: dict[str, Any] = {}
    _parser("tangram", where.find("parser")(), found)
    for name, text in _templates():
        found[f"template {name}"] = "template"
        for key, given, default, _ in _TEMPLATE_KEY.findall(text):
            found[f"template {name} {key}"] = f"= {default!r}" if given else "required"
    return dict(sorted(found.items()))


def _parser(place: str, parser: argparse.ArgumentParser, found: dict[str, Any]) -> None:
    found[place] = "verb"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                _parser(f"{place} {name}", inner, found)
            continue
        if isinstance(action, argparse._HelpAction):
            continue
        told = {"takes": str(action.nargs) if action.nargs is not None else "one",
                "default": _option_default(action.default), "required": action.required}
        if action.choices is not None:
            told["choices"] = list(action.choices)
        for spelling in action.option_strings or [str(action.metavar or action.dest)]:
            found[f"{place} {spelling}"] = told


def _option_default(value: Any) -> Any:
    if value is argparse.SUPPRESS:
        return None
    return value if isinstance(value, str | int | float | list | type(None)) else str(value)


def _templates() -> Iterator[tuple[str, str]]:
    """Each template whole, with the parts that it takes in, as users see it."""
    from .shell import run
    for line in run(["template", "list"])[1].splitlines():
        name = line.split()[0]
        yield name, run(["template", "show", name])[1]


# ---- environment --------------------------------------------------------------------------------


@functools.cache
def environment() -> dict[str, str]:
    """Environment variables that the package or the templates name."""
    found: dict[str, str] = {}
    for _, tree in walk.trees():
        for node in ast.walk(tree):
            for name in _read_names(node):
                found[name] = "read"
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                found.update(dict.fromkeys(_OURS.findall(text), "read"))
    for _, text in _templates():
        found.update(dict.fromkeys(_OURS.findall(text), "read"))
    return dict(sorted(found.items()))


def _read_names(node: ast.AST) -> Iterator[str]:
    """Names that this expression looks up in something called an environment."""
    key, owner = None, None
    if isinstance(node, ast.Subscript):
        key, owner = node.slice, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args and (
            node.func.attr in ("get", "pop", "setdefault")):
        key, owner = node.args[0], node.func.value
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        key, owner = node.left, node.comparators[0]
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and owner is not None:
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if "env" in name and _ENV_NAME.fullmatch(key.value):
            yield key.value


# ---- aliases ------------------------------------------------------------------------------------


def aliases(renames: Renames) -> list[str]:
    """One line for each old spelling that does not work any more."""
    works: dict[str, Callable[[str, str], bool]] = {
        "modules": _module_works, "names": _name_works, "settings": _setting_works,
        "options": _option_works, "env": _variable_works}
    lines = []
    for section, check in works.items():
        for old, new in renames.maps.get(section, {}).items():
            if new and (section != "names" or old.startswith(f"{where.PACKAGE}.")) and (
                    not check(old, new)):
                lines.append(f"renames.toml: [{section}] {old!r}: the old spelling does not work "
                             f"any more; keep an alias of {new!r} for one release")
    return lines


def _module_works(old: str, new: str) -> bool:
    """Whether the old name imports the new module. Where one of them needs an extra that is not
    installed, only the old file is looked for."""
    try:
        mine, theirs = importlib.import_module(old), importlib.import_module(new)
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith(where.PACKAGE) and walk.file_of(old) is not None
    return mine is theirs


def _name_works(old: str, new: str) -> bool:
    place, _, parameter = old.rstrip(")").partition("(")
    words = place.split(".")
    for size in range(len(words) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(words[:size]))
        except ImportError:
            continue
        try:
            for word in words[size:]:
                value = getattr(value, word)
        except AttributeError:
            return False
        return not parameter or _takes(value, parameter)
    return False


def _takes(value: Any, parameter: str) -> bool:
    try:
        inspect.signature(value).bind_partial(**{parameter: None})
    except TypeError:
        return False
    return True


def _setting_works(old: str, new: str) -> bool:
    label = max((x for x in where.SETTINGS if new.startswith(f"{x} ")), key=len, default="")
    before, after = old.rpartition(" ")[2], new.rpartition(" ")[2]
    model = where.resolve(where.SETTINGS[label])
    default = model.model_fields[after].get_default(call_default_factory=True)
    if label != "tangram.toml":
        return _accepts(model, before, default)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "old.toml"
        file.write_text(f"{before} = {_toml(default)}\n")
        try:
            where.find("load_config")({"HOME": folder, "TANGRAM_CONFIG": str(file)}, say=False)
        except where.find("InvalidInput"):
            return False
    return True


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if isinstance(value, tuple) else "{}" if isinstance(value, dict) else repr(value)


def _accepts(model: Any, key: str, value: Any) -> bool:
    """Whether a table with this key is not refused for it."""
    from pydantic import ValidationError
    try:
        model.model_validate({key: value})
    except ValidationError as error:
        return not any(e["loc"] == (key,) for e in error.errors())
    return True


def _option_works(old: str, new: str) -> bool:
    place, _, spelling = old.rpartition(" ")
    if place.startswith("template "):
        from .shell import run
        name = place.split()[1]
        status, _, err = run(["template", "render", name, "-o", f"{spelling}=1"])
        return status == 0 or spelling not in err
    parser = where.find("parser")()
    for word in (place if spelling.startswith("-") else old).split()[1:]:
        inner = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)),
                     None)
        if inner is None or word not in inner.choices:
            return not spelling.startswith("-") and inner is None  # a positional has no alias
        parser = inner.choices[word]
    return not spelling.startswith("-") or spelling in parser._option_string_actions


def _variable_works(old: str, new: str) -> bool:
    return old in environment()
