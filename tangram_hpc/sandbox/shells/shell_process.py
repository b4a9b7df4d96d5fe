"""A shell that lives on between the commands that are sent to it.

No prompt is read and no output is searched. The shell is an ordinary interactive shell (bash, or sh
where there is none) without a terminal of its own, whose script is a pipe that this process writes.
It says on another pipe, the control pipe, when a command begins and with what status it has ended.

One command is three lines of the script:

1. The text becomes the value of a variable. It is quoted, so whatever it holds is one word.
2. "b" goes to the control pipe, and `eval` runs the variable. A syntax error is the status of
   `eval` and not the shell's end. While `eval` runs, its standard input is not the script, and the
   control pipe is closed. So a command can neither read the script nor inherit the pipe.
3. "e", the status and the shell's flags go to the control pipe.

The end of the second line and the third line also switch tracing off until the next text, and take
away prompts that a command has set (`. venv/bin/activate` sets PS1): the shell would write them to
its error output. What these lines call is named with `\\command`, because a command may define an
alias or a function of the same name, such as `printf`.

The shell is interactive because only then an error such as an unset variable under `set -u`, or
SIGINT, ends the command and not the shell. On SIGINT such a shell throws away the line that it is
reading. So SIGINT is sent only after "b", when lines 1 and 2 have been read, and line 3 is then
sent again, as "y": only "y" shows that the signal has been dealt with. The serial number tells
what belongs to the next command. A process that was just being started misses the signal; see
`ShellCommand.chase`.

bash runs `eval` from a sourced line (`.`), because it then keeps its own remarks about jobs and
terminals to itself, as it does in a script.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress

from ...protocol.payload import ShellCall
from ...resources import process_tree
from ..environment import Grants, beyond_locale, hints
from ..process.command import RESTORED, find_program, give, in_directory
from ..process.spawn import spawn
from ..process.unstartable import Unstartable
from ..process.users import Identity
from .terminal import Terminal

_SOURCE = 252  # the descriptor from which bash reads the line that runs a command
_DIGITS_MAX = 20  # of a number that a shell says
_LINE_MAX = 256  # bytes of a line on the control pipe; ours are shorter
_PIECE = 1 << 16
_NAMES = ("bash", "sh", "dash", "ash")
_QUIET = "\\command set +xv; PS1= PS2="
_QUIET_BASH = f"\\command unset -v PROMPT_COMMAND PS0; {_QUIET}"
_EVER = ("TANGRAM_CPUS", "TANGRAM_CPUS_MAX")  # not the shell's to hide


class ShellProcess:
    """One shell, from its start to its end.

    Attributes:
        number: the number by which its client names it.
        pid: its process id, process group and process session.
        inside: its process id as the sandbox's /proc shows it; 0 until it has said so.
        script: the pipe to it; -1 once it has ended.
        control: the pipe on which it answers; -1 once it has ended.
        pipes: its output and its error output; for a shell on a terminal, the terminal and -1.
        terminal: its terminal; None for none.
        identity: the numbers of the user that it runs as; None for those of its init.
        began: the serial number of the command that began last.
        ended: the serial number of the command that ended last.
        code: the exit status of the command that ended last.
        status: its wait status; None while it lives.
        interrupted_ns: when SIGINT was sent to the command that runs (monotonic ns); 0 for never.
    """

    def __init__(self, number: int, program: str) -> None:
        self.number = number
        self.pid = self.inside = 0
        self.script = self.control = -1
        self.pipes: tuple[int, ...] = (-1, -1)
        self.terminal: Terminal | None = None
        self.identity: Identity | None = None
        self.began = self.ended = self.code = 0
        self.status: int | None = None
        self._program = program
        self._bash = program.rpartition("/")[2] == "bash"
        # sh names descriptors by one digit; bash leaves the low ones to its commands
        self._fd = 253 if self._bash else 9
        self._quieten = _QUIET_BASH if self._bash else _QUIET
        self._serial = 0
        self._unwritten = bytearray()
        self._said = b""
        self._flags = ""
        self._grant: dict[str, str] = {}
        self._sources = False  # whether it can read a file from a descriptor
        self._told = 0  # the serial number of the command whose status has been told
        self.interrupted_ns = 0  # when SIGINT was sent to the command that runs (monotonic)
        self._unsure = False  # a signal was sent, so "y" must be heard
        self._interrupted = 0  # the serial number of the command that gets a signal as it begins

    # ---- its start ----

    def start(self, call: ShellCall, env: dict[str, str], home: str, devnull: int,
              identity: Identity | None = None) -> None:
        """Starts the shell, as another user if `identity` is given. The shell then writes "h" to
        the control pipe.

        Raises:
            Unstartable: it could not be started.
        """
        ends: list[int] = []
        self.identity = identity
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if self._fd >= most:
            raise Unstartable(126, f"shell: bash needs a limit of {self._fd + 1} open files, and "
                              f"the worker has {most}; start the worker with `ulimit -n 1024`, or "
                              "say program=\"sh\"")
        try:
            if call.size != (0, 0):
                self.terminal = Terminal(call.size, call.echo)
                self.terminal.give(identity)
                outputs = (self.terminal.program, self.terminal.program)
                self.pipes = (self.terminal.fd, -1)
            else:
                out, err = os.pipe(), os.pipe()
                self.pipes, outputs = (out[0], err[0]), (out[1], err[1])
                ends += outputs
                give(identity, outputs)
            script, control = os.pipe(), os.pipe()
            self.script, self.control = script[1], control[0]
            ends += [script[0], control[1]]
            self._spawn(call.cwd, home, env, (script[0], *outputs, control[1]))
        except (Unstartable, OSError) as error:
            self.close()
            if isinstance(error, Unstartable):
                raise
            raise Unstartable(126, f"shell: {error.strerror}") from None
        finally:
            for fd in ends:
                os.close(fd)
        if self.terminal is not None:
            self.terminal.started()
        for fd in (self.script, self.control, *(fd for fd in self.pipes if fd >= 0)):
            os.set_blocking(fd, False)
        begin = "set +m; PS1= PS2=; __tangram_was() { return \"$1\"; }\n"
        if self._bash:
            begin += ("set +H +o history; unset HISTFILE MAILCHECK PROMPT_COMMAND PS0\n"
                      f"\\command . /dev/fd/{_SOURCE} {_SOURCE}<<<"
                      f"'\\command printf \"s\\n\" >&{self._fd}'\n")
        self._put(f"{begin}\\command printf 'h %s\\n' \"$$\" >&{self._fd}\n")

    def _spawn(self, cwd: str, home: str, env: dict[str, str], fds: tuple[int, ...]) -> None:
        options = ["--norc", "--noprofile", "--noediting"] if self._bash else []
        argv = [self._program, *options, "-i"]
        numbers = (0, 1, 2, self._fd)
        terminal = self.terminal.path if self.terminal is not None else ""
        try:
            with in_directory(cwd, home):
                self.pid = spawn(self.identity, self._program, argv, env,
                                 dict(zip(numbers, fds, strict=True)), terminal, RESTORED)
        except OSError as error:
            raise Unstartable(126, f"shell: cannot run {self._program!r}: {error.strerror}",
                              error.errno == 11) from None
        except UnicodeEncodeError as error:
            raise Unstartable(126, f"shell: {beyond_locale(error)}") from None
        except (ValueError, TypeError) as error:
            raise Unstartable(126, f"shell: {error}") from None
        self._grant = {name: env[name] for name, _ in hints(1) if name in env}

    # ---- commands ----

    def run(self, text: str, file: str, stdin: str, grants: Grants,
            granted: tuple[int, int, str]) -> int:
        """Sends a command; returns its serial number.

        Args:
            text: what it runs; `file` is the path of a file that holds it, if it is long: a shell
                reads a pipe byte by byte.
            stdin: the path of the file that is its standard input.
            grants: the environments of the sandbox.
            granted: CPUs now, CPUs at most, and the value of CUDA_VISIBLE_DEVICES.
        """
        self._serial += 1
        self.interrupted_ns = 0
        line = f"\\command eval \"$__tangram\" <{_quoted(stdin)} {self._fd}>&-"
        if self._sources:
            line = (f"\\command . /dev/fd/{_SOURCE} {_SOURCE}<<<"
                    f"{_quoted(f'{line} {_SOURCE}<&-')}")
        value = _quoted(self._first_line() + text)
        if file:
            read = f"<{_quoted(file)}" if self._bash else f"\\cat {_quoted(file)}"
            value = f'{_quoted(self._first_line())}"$({read})"'
        self._put(f"{self._granting(grants.plain(*granted))}__tangram={value}\n"
                  f"\\command printf 'b %s\\n' {self._serial} >&{self._fd}; {line}; "
                  f"{{ __tangram_code=$? __tangram_flags=$-; {self._quieten}; }} 2>/dev/null\n"
                  + self._last_line())
        return self._serial

    def _first_line(self) -> str:
        """Returns what `eval` runs before the text: it restores the tracing flags and the exit
        status that the third line of the command before has changed."""
        words = ["\\command unset __tangram"]
        if back := "".join(flag for flag in "xv" if flag in self._flags):
            words.append(f"\\command set -{back}")
        elif self.code and "e" not in self._flags:  # under `set -e` it would end the shell
            words.append(f"__tangram_was {self.code}")
        return "; ".join(words) + "\n"

    def _last_line(self, word: str = "e") -> str:
        """Returns the third line of a command's script, which reports the command's end and does
        not appear in a trace. The end of the second line has kept the status and the flags, unless
        SIGINT came in between.
        """
        return (f"{{ \\command printf '{word} %s %s %s\\n' {self._serial} "
                f"\"${{__tangram_code-$?}}\" \"${{__tangram_flags-$-}}\" >&{self._fd}; "
                "\\command unset __tangram_code __tangram_flags; "
                f"{self._quieten}; }} 2>/dev/null\n")

    def _granting(self, env: dict[str, str]) -> str:
        """Returns the shell commands that update the variables of the grant, if it has changed. A
        variable that is only a hint (OMP_NUM_THREADS, MAKEFLAGS) keeps a value that a command has
        given it.
        """
        lines = []
        for name in dict(hints(1)):
            new, old = env[name], self._grant.get(name)
            if new == old:
                continue
            change = f"\\command export {name}={_quoted(new)}"
            if name not in _EVER and old is not None:
                change = f"case ${{{name}-}} in {_quoted(old)}) {change};; esac"
            lines.append(change + "\n")
            self._grant[name] = new
        if env["CUDA_VISIBLE_DEVICES"] != self._grant.get("CUDA_VISIBLE_DEVICES", ""):
            self._grant["CUDA_VISIBLE_DEVICES"] = env["CUDA_VISIBLE_DEVICES"]
            lines.append("\\command export CUDA_VISIBLE_DEVICES="
                         f"{_quoted(env['CUDA_VISIBLE_DEVICES'])}\n")
        return "".join(lines)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Sends a signal to the command that runs in the foreground, as soon as it has begun.
        Background jobs of a shell ignore SIGINT.
        """
        if self.began < self._serial:
            self._interrupted = number
            return
        if self.ended >= self._serial or self.status is not None:
            return
        if self.terminal is not None:
            self.terminal.interrupt(number, self.pid)
        else:
            with suppress(OSError):  # it has ended
                os.killpg(self.pid, number)
        # A shell that was just reading its third line has thrown a part of it away, and one that
        # has run it may still throw the next line away: it has ended when it has run one of these.
        # The first of them may be thrown away too.
        self._unsure = True
        self.interrupted_ns = time.monotonic_ns() if number == signal.SIGINT else 0
        self._put(f"\n{self._last_line(word='y')}\n{self._last_line(word='y')}")

    def _put(self, text: str) -> None:
        self._unwritten += text.encode("utf-8", "surrogateescape")
        self.write_more()

    def write_more(self) -> None:
        """Writes the part of the script that the pipe has had no room for, as far as it has now."""
        try:
            while self._unwritten and self.script >= 0:
                del self._unwritten[: os.write(self.script, self._unwritten[:_PIECE])]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, or closed its script; SIGCHLD or the control pipe tells
            self._unwritten.clear()

    @property
    def waits_to_write(self) -> bool:
        """Whether a part of the script waits for room."""
        return bool(self._unwritten)

    # ---- what it says ----

    def listen(self) -> bool:
        """Reads the control pipe; returns False when the shell has closed it."""
        while True:
            try:
                data = os.read(self.control, 4096)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._said = (self._said + data).split(b"\n")
            self._said = self._said[:_LINE_MAX]
            for line in lines:
                self._hear(line.decode("ascii", "replace").split(" "))

    def _hear(self, words: list[str]) -> None:
        numbers = [int(word) for word in words[1:3]
                   if word.isascii() and word.isdigit() and len(word) < _DIGITS_MAX]
        if words[0] == "h" and numbers and not self.inside:
            self.inside = numbers[0]
        elif words[0] == "s" and not self.inside:
            self._sources = True
        elif words[0] == "b" and numbers == [self._serial]:
            self.began = self._serial
            if self._interrupted:
                number, self._interrupted = self._interrupted, 0
                self.interrupt(number)
        elif words[0] in "ey" and len(numbers) == 2 and numbers[0] == self._serial > self.ended:
            if self._told != self._serial:
                self._told, self.code = self._serial, numbers[1] & 0xFF
                self._flags = words[3] if len(words) > 3 else ""
            if words[0] == "y" or not self._unsure:
                self.ended, self._unsure = self._serial, False

    # ---- between commands, and its end ----

    def stop(self) -> None:
        """Stops it, as no command of it runs."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues it."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it with its process group, to which its background jobs belong."""
        if self.pid and self.status is None:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid and self.status is None:
            with suppress(OSError):
                os.kill(self.pid, number)

    def cpu_ns(self) -> int:
        """CPU time in ns of it and of its children that have ended, in whole clock ticks."""
        return process_tree.cpu_ns(self.inside) if self.inside else 0

    def close(self) -> None:
        """Closes all descriptors."""
        for fd in (self.script, self.control, *(() if self.terminal else self.pipes)):
            if fd >= 0:
                os.close(fd)
        if self.terminal is not None:
            self.terminal.close()
        self.script = self.control = -1
        self.pipes = (-1, -1)


def program_of(name: str, env: dict[str, str]) -> str:
    """The path of a shell's program.

    Args:
        name: `bash`, `sh`, `dash` or `ash`, or a path of one of them; empty for bash, or sh where
            there is no bash.
        env: the environment that says where programs are.

    Raises:
        Unstartable: there is none, or it is not known how to talk to it.
    """
    if name:
        if name.rpartition("/")[2] not in _NAMES:
            raise Unstartable(126, f"program: {name!r} is not one of {', '.join(_NAMES)}")
        return find_program(name, env)
    for name in ("bash", "/bin/bash"):
        with suppress(Unstartable):
            path = find_program(name, env)
            if os.access(path, os.X_OK):
                return path
    return "/bin/sh"


def _quoted(text: str) -> str:
    """The text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"
