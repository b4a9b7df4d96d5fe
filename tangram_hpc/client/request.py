"""Pure. Checks what a caller wrote and makes an Action, a SessionSpec or a payload of it.

A wrong argument is an InvalidInput that names it, before anything is sent.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..domain.action import Action, Kind, Profile
from ..domain.image_name import parse_image_name
from ..domain.isolation import BACKENDS, is_runtimes_own
from ..domain.outcome import TEXT_MAX
from ..domain.rollouts import NAME_MAX, Turn
from ..domain.session import BACKGROUNDS, LOOPBACK, OPEN, SNAPSHOT_NAME, Network, SessionSpec
from ..errors import InvalidInput
from ..protocol import payload as pl
from ..protocol.allow_list import checked_entries
from ..protocol.message import INLINE_MAX
from ..protocol.process_frames import PAYLOAD_MAX
from ..protocol.reading import reader
from .command_names import name_of

_MIB_END = 1 << 63  # a message cannot hold more
_UNITS = {"": 1, "m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024,
          "t": 1024 * 1024, "k": 1 / 1024}

ONCE_MAX = 200  # bytes of an idempotency key
SECRETS_MAX = 64  # of one session
NAME_CUT = 80  # characters of a name that was guessed
COUNT_MAX = (1 << 40) - 1  # of tokens and characters
CPUS_MAX = 1 << 16  # of one action: more than any node has

_encoder = msgspec.msgpack.Encoder()
# field of a struct -> the argument that users know
_WRITTEN_AS = {"degrees": "cpus", "mem_mib": "mem", "disk_mib": "disk", "attempts_max": "retries",
               "argv": "work", "shell": "work", "names": "once"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_BYTES = (bytes, bytearray, memoryview)
_FILES = (".sif", ".sqsh", ".sqfs", ".squashfs", ".tar")  # images that each node unpacks
_R = TypeVar("_R", Action, SessionSpec)

NETWORKS: Mapping[str, Network] = {"off": False, "loopback": LOOPBACK, "open": OPEN,
                                   "host": True}
Cpus = int | Sequence[int]
Reach = bool | str | Iterable[str]
Secrets = Mapping[str, str] | Iterable[str]
Work = Callable[..., Any] | Sequence[str] | str


class Options(NamedTuple):
    """How an action shall be served; the fields are arguments of `Client.submit`."""

    cpus: Cpus = 1
    mem: int | str = 0
    gpus: int = 0
    timeout: float | None = None
    name: str = ""
    retries: int | None = None
    resizable: bool = True
    component: str = ""
    profile: Profile | None = None
    trusted: bool = False
    endpoint: str = ""
    once: str = ""
    trajectory: str = ""
    turn: Turn | None = None
    direct: bool = False  # it serves direct calls; no argument of `submit`


def session_spec(base: SessionSpec, *, mem: int | str | None = None,
                 disk: int | str | None = None, backend: str | None = None,
                 image: str | None = None, network: Reach | None = None,
                 trusted: bool | None = None, background: str | None = None,
                 idle_s: float | None = None, grace_s: float | None = None,
                 name: str | None = None, component: str | None = None,
                 movable: bool | None = None, ttl_s: float | None = None,
                 outlives: bool | None = None, secrets: Secrets | None = None,
                 background_cpus: Cpus | None = None, writable: bool | None = None,
                 user: str | int | None = None, snapshot: str | None = None) -> SessionSpec:
    """Makes a session's specification: `base` with the given fields replaced. The fields are
    arguments of `Client.session`; None keeps the base's.

    Raises:
        InvalidInput: a field is wrong; names it.
    """
    _check_image(backend if backend is not None else base.backend, image)
    if backend not in (None, "", *BACKENDS):
        raise InvalidInput(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if snapshot:
        _check_snapshot(snapshot, image)
    if background not in (None, *BACKGROUNDS):
        raise InvalidInput(f"background: {background!r} is not one of {', '.join(BACKGROUNDS)}")
    given = {
        "mem_mib": None if mem is None else mib_of(mem),
        "disk_mib": None if disk is None else mib_of(disk, "disk"),
        "backend": backend, "image": image, "trusted": trusted,
        "network": None if network is None else network_of(network),
        "background": background, "name": name, "component": component,
        "movable": movable, "outlives": outlives, "snapshot": snapshot,
        "ttl_ns": None if ttl_s is None else _ns_of(ttl_s, "ttl_s"),
        "secrets": None if secrets is None else secret_pairs(secrets),
        "background_cpus": None if background_cpus is None else degrees_of(
            background_cpus, "background_cpus"),
        "writable": writable, "user": None if user is None else user_name(user),
        "idle_ns": None if idle_s is None else _ns_of(idle_s, "idle_s"),
        "grace_ns": None if grace_s is None else _ns_of(grace_s, "grace_s"),
    }
    if background not in (None, "run") and background_cpus is None:
        given["background_cpus"] = SessionSpec(0).background_cpus  # those of its origin go with it
    spec = msgspec.structs.replace(base, **{k: v for k, v in given.items() if v is not None})
    _check_movable(spec)
    return sendable(spec)


def _check_snapshot(snapshot: object, image: str | None) -> None:
    """Checks the name of a snapshot. Raises InvalidInput if it is none, or if an image is named
    too.
    """
    if not isinstance(snapshot, str) or not SNAPSHOT_NAME.fullmatch(snapshot):
        raise InvalidInput(f"snapshot: {snapshot!r:.60} is not a name that Session.snapshot or "
                           "Client.prepared returned")
    if image:
        raise InvalidInput(f"image: {image!r:.60}: a session that begins from a snapshot has its "
                           "image; leave it out")


def network_of(network: Reach) -> Network:
    """Converts the argument `network` of a session to the form of its specification.

    Raises:
        InvalidInput: the argument is not True, False, one of `NETWORKS` or an allow-list.
    """
    if isinstance(network, bool):
        return network
    if isinstance(network, str) and network in NETWORKS:
        return NETWORKS[network]
    if isinstance(network, Iterable) and not isinstance(network, str | bytes | Mapping):
        return checked_entries(network)
    raise InvalidInput(f"network: {network!r:.60} is neither True nor False, nor one of "
                       f"{', '.join(NETWORKS)}, nor a list of names that may be reached")


def _check_movable(spec: SessionSpec) -> None:
    """Raises InvalidInput: the session could not go on with its changes on another node."""
    if spec.movable and spec.writable and spec.image and not is_runtimes_own(
            spec.backend, spec.image) and (
            not spec.image.startswith("/") or spec.image.endswith(_FILES)):
        raise InvalidInput("movable: each node unpacks this image for itself, and the session's "
                           "changes fit one of them only; name a folder that all nodes have, or "
                           "pass writable=False")


def context_of(spec: SessionSpec, env: dict[str, str], trajectory: str) -> bytes | None:
    """Returns what clients that attach to this session are told; None if it is not shared.

    Raises:
        InvalidInput: the variables are not UTF-8, or too many for a message.
    """
    if not spec.shared:
        return None
    context = packed(pl.SessionContext(env, trajectory), "env, trajectory")
    if len(context) > INLINE_MAX:
        raise InvalidInput(f"env: the variables of a shared session take {len(context)} bytes, "
                           f"and {INLINE_MAX} are the most; write large values into a file of the "
                           "session")
    return context


def secret_pairs(secrets: Secrets) -> tuple[tuple[str, str], ...]:
    """Pairs of a variable and the name of the secret that is its value.

    Raises:
        InvalidInput: it is neither a list of names nor a mapping of variables to names, or a name
            cannot be used.
    """
    if isinstance(secrets, Mapping):
        pairs = tuple(secrets.items())
    elif isinstance(secrets, Iterable) and not isinstance(secrets, str | bytes):
        pairs = tuple((name, name) for name in secrets)
    else:
        raise InvalidInput(f"secrets: {type(secrets).__name__} is neither a list of names nor a "
                           "mapping of variables to names")
    if len(pairs) > SECRETS_MAX:
        raise InvalidInput(f"secrets: {len(pairs)} of them; at most {SECRETS_MAX} are possible")
    for name in (name for pair in pairs for name in pair):
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise InvalidInput("secrets: a variable and the name of a secret have 1 to 100 letters,"
                               " digits and underscores")  # a value by mistake is not shown
    return pairs


def secret_values(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Checks the values of secrets by name, and never shows one.

    Raises:
        InvalidInput: a name or a value cannot be used.
    """
    if not isinstance(values, Mapping):
        raise InvalidInput("values: not a mapping of names to texts")
    secret_pairs(list(values))
    for name, value in values.items():
        if value is not None and (not isinstance(value, str) or "\0" in value
                                  or value != value.encode(errors="replace").decode()):
            raise InvalidInput(f"values[{name!r}]: not a text that an environment variable can "
                               "hold, nor None")
    return dict(values)


def command_user(user: str | int, session: SessionSpec | None) -> str:
    """Returns the user of a command as text: the one that is named, else the session's.

    Raises:
        InvalidInput: a user is named for a command without a session, or it is none.
    """
    name = user_name(user)
    if session is not None:
        return name or session.user
    if name:
        raise InvalidInput("user: only a session has users; open one with an image")
    return ""


def user_name(user: str | int) -> str:
    """The user of a command as text: a name or a number; empty for the sandbox's own.

    Raises:
        InvalidInput: it is neither.
    """
    if isinstance(user, str) and len(user) <= NAME_CUT:
        return user
    if isinstance(user, int) and not isinstance(user, bool) and 0 <= user < 1 << 32:
        return str(user)
    raise InvalidInput(f"user: {user!r:.60} is neither the name nor the number of a user")


def _check_image(backend: str, image: object) -> None:
    if isinstance(image, str) and 0 < len(image) <= TEXT_MAX and not is_runtimes_own(
            backend, image):
        parse_image_name(image)


def sendable(record: _R) -> _R:
    """Returns the record if it can be sent and the broker can read it.

    Raises:
        InvalidInput: a field has the wrong type, a text in it is not UTF-8, or a number has more
            than 64 bits, or a text is too long for a journal.
    """
    if len(packed(record, "name, image, component")) > TEXT_MAX:
        for field in ("name", "component", "image"):
            if len(getattr(record, field, "")) > TEXT_MAX:
                raise InvalidInput(f"{field}: it has more than {TEXT_MAX} characters")
    return record


def utf8(text: str, field: str) -> bytes:
    """The bytes of a text.

    Args:
        text: the text.
        field: the argument that holds it, for the error.

    Raises:
        InvalidInput: the text is not UTF-8: it holds half of a surrogate pair or a byte of a file
            name.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{field}: {text[:40]!r} is not UTF-8") from None


def check_size(size: int, what: str, most: int) -> None:
    """Checks the size of a payload before anything of it is stored.

    Args:
        size: in bytes.
        what: the arguments that it is made of, for the error.
        most: the most that the action's process on its node takes.

    Raises:
        InvalidInput: it is too large.
    """
    if size > most:
        raise InvalidInput(f"{what}: {size} bytes are more than one action takes ({most}); write "
                           "large data into files that the nodes share, and pass their paths")


def packed(record: msgspec.Struct, texts: str, most: int = PAYLOAD_MAX) -> bytes:
    """Returns the bytes of an action, a session, a query or a payload.

    The bytes are decoded once, as the receiver will do it. A record that the receiver cannot read
    would end the channel, and each later channel too, because open actions are submitted again
    there. The client would then never be served.

    Args:
        record: the record.
        texts: the arguments that hold texts, for the error.
        most: the most bytes that may result.

    Raises:
        InvalidInput: a field has the wrong type, a text is not UTF-8, a number has more than 64
            bits, or there are too many bytes.
    """
    try:
        data = _encoder.encode(record)
        if len(data) > most:
            check_size(len(data), texts, most)
        _reader(type(record))(data)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{texts}: {error.object[:40]!r} is not UTF-8") from None
    except OverflowError:
        raise InvalidInput("timeout, mem, profile: a number has more than 64 bits") from None
    except (TypeError, msgspec.DecodeError):
        raise InvalidInput(_wrong_type(record)) from None
    return data


_reader = cache(reader)


def _wrong_type(record: msgspec.Struct) -> str:
    """Describes the first field that does not have its type, in one line."""
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        try:
            reader(field.type)(_encoder.encode(value))
        except TypeError:
            why = f"a {type(value).__name__} cannot be sent"
        except msgspec.DecodeError as error:
            why = str(error).partition(" - at ")[0].replace("Expected", "expected")
        else:
            continue
        return f"{_WRITTEN_AS.get(field.name, field.name)}: {why}"
    raise AssertionError(f"all fields of {record!r} are of their types")


def _ns_of(seconds: float, field: str, bound: str = ">= 0") -> int:
    try:
        if 0 <= seconds < 1e9 and not isinstance(seconds, bool):
            return round(seconds * 1e9)
    except TypeError:
        pass  # said below
    raise InvalidInput(f"{field}: {seconds!r} is not a number of seconds {bound}")


def seconds_of(seconds: float, field: str) -> float:
    """An argument that is a time, as a float. Raises InvalidInput if it is not a number of
    seconds >= 0.
    """
    _ns_of(seconds, field)
    return float(seconds)


def check_text(text: str, field: str) -> None:
    """Raises InvalidInput if an argument is not a text that can be sent."""
    if not isinstance(text, str):
        raise InvalidInput(f"{field}: {text!r:.60} is not a text; write it in quotes")
    utf8(text, field)


def check_flag(flag: bool, field: str) -> None:
    """Raises InvalidInput if an argument is neither True nor False. A text such as "false" would
    otherwise count as true.
    """
    if not isinstance(flag, bool):
        raise InvalidInput(f"{field}: {flag!r:.60} is neither True nor False")


def degrees_of(cpus: Cpus, field: str = "cpus") -> tuple[int, ...]:
    """The degrees that a caller's `cpus` stands for: `n` is (n,), a pair is every whole number from
    min to max, and a list or a longer tuple is as given. `field` is the argument's name.

    Raises:
        InvalidInput: not ascending whole numbers >= 1.
    """
    if type(cpus) is int and 0 < cpus <= CPUS_MAX:
        return (cpus,)
    degrees: tuple[int, ...] = ()
    try:
        if isinstance(cpus, tuple) and len(cpus) == 2:
            degrees = tuple(range(_whole(cpus[0]), min(_whole(cpus[1]), CPUS_MAX + 1) + 1))
        elif isinstance(cpus, Iterable) and not isinstance(cpus, str | bytes | Mapping):
            degrees = tuple(map(_whole, cpus))
        else:
            degrees = (_whole(cpus),)
    except TypeError:
        pass  # said below
    if not degrees or degrees[0] < 1 or list(degrees) != sorted(set(degrees)):
        raise InvalidInput(f"{field}: {cpus!r} is not a whole number >= 1, a pair (min, max) or a "
                           "list of ascending degrees")
    if degrees[-1] > CPUS_MAX:
        raise InvalidInput(f"{field}: {cpus!r} is more than the {CPUS_MAX} that an action may have")
    return degrees


def _whole(number: Any) -> int:
    """A whole number; an element of an array counts, a bool does not. Raises TypeError."""
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


def count_of(number: Any, field: str, most: int | None = None) -> int:
    """An argument that counts something, up to `most` (None: any number).

    Raises:
        InvalidInput: it is not a whole number, below 0, or above `most`.
    """
    if type(number) is int and number >= 0 and (most is None or number <= most):
        return number
    try:
        count = _whole(number)
    except TypeError:
        count = -1
    if most is not None and not 0 <= count <= most:
        raise InvalidInput(f"{field}: {number!r} is not a whole number from 0 to {most}")
    if count < 0:
        raise InvalidInput(f"{field}: {number!r} is not a whole number >= 0")
    return count


def mib_of(mem: int | str, field: str = "mem") -> int:
    """An amount of memory in MiB, with parts of a MiB rounded up. An int is in MiB already; a
    string may end in K, M, G or T, which are powers of 1024.

    Raises:
        InvalidInput: it is neither of them, negative, or more than 64 bits hold.
    """
    if type(mem) is int and 0 <= mem < _MIB_END:
        return mem
    text = str(mem).strip().lower()
    digits = text.rstrip("kmgtib")
    try:
        mib = int(-(-float(digits) * _UNITS[text[len(digits):]] // 1))
    except (ValueError, KeyError, OverflowError):
        mib = -1
    if not 0 <= mib < _MIB_END:
        raise InvalidInput(f"{field}: {mem!r} is not an amount of memory; write 512 (MiB), "
                           "'512M' or '2G'")
    return mib


def make_action(action: int, kind: Kind, options: Options, session: int, what: str,
                key: str = "cpu") -> Action:
    """Makes the action for these options.

    Args:
        action: its id.
        kind: what it is.
        options: how it shall be served.
        session: the id of its session; 0 for none.
        what: its name, where `options` has none.
        key: its key resource, where `options` names no endpoint.

    Raises:
        InvalidInput: an option is wrong; names it.
    """
    check_flag(options.trusted, "trusted")
    timeout_ns = 0
    if options.timeout is not None:
        timeout_ns = _ns_of(options.timeout, "timeout", "> 0; leave it out for no limit")
        if not timeout_ns:
            raise InvalidInput(f"timeout: {options.timeout!r} is not a number of seconds > 0")
    if not isinstance(options.endpoint, str):
        raise InvalidInput(f"endpoint: {options.endpoint!r} is not the name of an endpoint")
    if options.endpoint and options.cpus != 1:
        raise InvalidInput("cpus: an action of an endpoint holds no core; leave it out, or make "
                           "the call by Client.endpoint and compute in another action")
    if not isinstance(options.once, str) or (
            options.once and len(utf8(options.once, "once")) > ONCE_MAX):
        raise InvalidInput(f"once: {options.once!r} is not a name of at most {ONCE_MAX} bytes")
    retries = options.retries
    if retries is None:
        retries = 0 if session or options.endpoint else 2
    return sendable(Action(
        id=action, name=options.name or what[:NAME_CUT], kind=kind,
        degrees=(0,) if kind is Kind.FILE else degrees_of(options.cpus),
        mem_mib=mib_of(options.mem), gpus=count_of(options.gpus, "gpus"), session=session,
        timeout_ns=timeout_ns, attempts_max=1 + count_of(retries, "retries"),
        resizable=options.resizable, component=options.component, profile=options.profile,
        trusted=options.trusted and kind is Kind.EXEC,
        key=f"endpoint:{options.endpoint}" if options.endpoint else key, once=options.once,
        trajectory=options.trajectory, turn=options.turn,
        guessed=kind is Kind.EXEC and not options.name))


def trajectory_name(trajectory: str | int | None) -> str:
    """The name of a trajectory as text.

    Raises:
        InvalidInput: it is None, empty, too long, or cannot be sent.
    """
    if trajectory is None:
        raise InvalidInput("trajectory: None is no name: turns without one would be one trajectory")
    name = str(trajectory)
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= NAME_MAX:
        raise InvalidInput(f"trajectory: {name[:40]!r} is not a name of 1 to {NAME_MAX} bytes")
    return name


def tool_of(trajectory: str | int | None) -> str:
    """The name of the trajectory whose tool a work is; empty for none, which is "" or None. Raises
    as `trajectory_name`.
    """
    return trajectory_name(trajectory) if trajectory not in ("", None) else ""


def kept_output(output_max: int, keep: str, stream: bool) -> int:
    """Returns `output_max` of a command, checked with `keep`. Raises InvalidInput."""
    if keep not in pl.KEEPS:
        raise InvalidInput(f"keep: {keep!r} is not one of {', '.join(pl.KEEPS)}")
    if stream and keep != "head":
        raise InvalidInput(f"keep: {keep!r} cannot be had of output that is streamed by on_output; "
                           "leave one of them out")
    return count_of(output_max, "output_max")


def exec_call(work: Sequence[str] | str, *, cwd: str = "", env: Mapping[str, str] | None = None,
              stdin: bytes | str = b"", files: Mapping[str, bytes | str] | None = None,
              stream: bool = False, clean_env: bool = True, output_max: int = 0,
              keep: str = "head", user: str = "", real_user: bool = False
              ) -> tuple[pl.ExecCall, str]:
    """Makes the payload of a command, and guesses the name of its class (`command_names`). The
    arguments are those of `Client.submit`.

    Raises:
        InvalidInput: an empty command, a field of the wrong type, or too many bytes.
    """
    if not isinstance(work, Iterable) or isinstance(work, bytes | bytearray | memoryview | Mapping):
        raise InvalidInput(f"work: {work!r:.60} is neither a list of words, a shell line nor a "
                           "function")
    check_flag(real_user, "real_user")
    shell = work if isinstance(work, str) else ""
    argv = () if isinstance(work, str) else tuple(map(_word, work))
    if not (shell.strip() if isinstance(work, str) else argv):
        raise InvalidInput("work: the command is empty")
    kept = kept_output(output_max, keep, stream)
    raw, given = raw_files(files), raw_bytes(stdin, "stdin")
    check_size(sum(map(len, raw.values())) + len(given), "stdin, files", PAYLOAD_MAX)
    call = pl.ExecCall(argv=argv, shell=shell, env=environment(env),
                       cwd=folder_text(cwd), stdin=given, files=raw, stream=stream,
                       clean_env=clean_env, output_max=kept,
                       keep=keep, user=user, real_user=real_user)
    return call, name_of(shell, argv)


def _word(word: object) -> str:
    """A word of an argv as text, such as a path or a number. None and bytes would become texts that
    nobody means."""
    if word is None or isinstance(word, _BYTES):
        raise InvalidInput(f"work: the word {word!r:.60} of the command is not a text")
    return str(word)


def folder_text(cwd: object) -> str:
    """The working directory of a command as text; empty, as for None, for the session's own.

    Raises:
        InvalidInput: it is neither a text nor a path.
    """
    if cwd is None:
        return ""
    folder = os.fspath(cwd) if isinstance(cwd, os.PathLike) else cwd
    if not isinstance(folder, str):
        raise InvalidInput(f"cwd: {cwd!r:.60} is neither a text nor a path")
    return str(folder)


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Checks environment variables and makes their values texts.

    Raises:
        InvalidInput: it is not a mapping, a name is not a text, or a value is None or bytes.
    """
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidInput(f"env: {type(env).__name__} is not a mapping of names to texts")
    for name, value in env.items():
        if not isinstance(name, str):
            raise InvalidInput(f"env: the name {name!r} is not a text")
        if value is None or isinstance(value, _BYTES):
            raise InvalidInput(f"env[{name!r}]: {value!r:.60} is not a text; leave the name out, "
                               "or give it a text")
    return {name: str(value) for name, value in env.items()}


def raw_files(files: Mapping[str, bytes | str] | None) -> dict[str, bytes]:
    """Checks files (path -> content) and makes their contents bytes.

    Raises:
        InvalidInput: it is not a mapping, or a content is neither bytes nor str.
    """
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise InvalidInput(f"files: {type(files).__name__} is not a mapping of paths to contents")
    return {path: raw_bytes(data, f"files[{path!r}]") for path, data in files.items()}


def raw_bytes(data: bytes | str, field: str) -> bytes:
    """The bytes of a file's content; a str becomes UTF-8.

    Raises:
        InvalidInput: it is neither bytes nor str.
    """
    if isinstance(data, str):
        return utf8(data, field)
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise InvalidInput(f"{field}: {type(data).__name__} is neither bytes nor str")
