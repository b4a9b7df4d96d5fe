"""How a command of the E2B wire is started so that it can go to the background. Pure.

A client of this wire may start a command while another command still runs, and does not say which
commands are meant to run in the background. A session runs one action at a time. So each command is
an action of a small bash program (`PROGRAM`) with three parts:

- The *watcher* is the action's own process. It passes the command's output on while it runs.
- The *keeper* is in a process group of its own, waits for the command and writes its exit code to a
  file.
- The command is the keeper's child. Its output goes to two files.

When another request needs the session, the watcher gets the signal `LET_GO`. It passes on one more
piece of the output and ends by that signal; it never ends so when the command has ended by itself.
Keeper and command go on as background processes, and the rest of the output is read from the files.
A command that ends before another request comes is one action and nothing more.

The watcher passes output on in pieces of at most 1 MiB of each stream, and looks for signals and
for the command's end between them. So a command that writes faster than its output is passed on can
go to the background at any time.

The watcher's first line on stdout is `KEEPER COMMAND FOLDER` (two process ids and the folder of the
files), or `cwd` if the command's directory cannot be entered.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LET_GO = signal.SIGUSR2
KILLED = 137  # the exit code of a command whose keeper was killed too

# Variables that are set before the keeper begins have the prefix `e2b_`: the command would inherit
# them if a client had exported a variable of the same name.
PROGRAM = r"""
unset TANGRAM_E2B
e2b_slot=$1 e2b_old=$2 e2b_cwd=$3 e2b_stdin=$4; shift 4
e2b_d=${TMPDIR:-/tmp}/.e2b; e2b_f=$e2b_d/$e2b_slot
[[ -d $e2b_d ]] || mkdir -p "$e2b_d" || exit 126
for e2b_n in $e2b_old; do rm -f "$e2b_d/$e2b_n."*; done
: >"$e2b_f.out" >"$e2b_f.err"
if [[ $e2b_cwd ]]; then cd -- "$e2b_cwd" 2>/dev/null || { echo cwd; exit 0; }; fi
e2b_in=/dev/null
if [[ $e2b_stdin ]]; then
  e2b_in=$e2b_f.in; [[ -p $e2b_in ]] || mkfifo "$e2b_in" || exit 126
fi
exec 7>&2 2>/dev/null
set -m
coproc {
  exec 7>&-; read -r _  # until the watcher has its own pipe: bash closes a coproc's
  trap : HUP INT QUIT TERM USR1 USR2; trap '' PIPE
  if [[ $e2b_stdin ]]; then
    exec 9<>"$e2b_in"; sleep 2147483647 >&9 & e2b_holder=$!
    echo $e2b_holder >"$e2b_f.hold"; exec 9>&-
  fi
  ( trap - HUP INT QUIT TERM USR1 USR2 PIPE; echo "$BASHPID $e2b_d"
    exec "$@" <"$e2b_in" >"$e2b_f.out" 2>"$e2b_f.err" )
  c=$?; [[ $e2b_stdin ]] && kill -KILL $e2b_holder; echo $c >"$e2b_f.code"; echo end
}
keeper=$COPROC_PID; exec 8<&"${COPROC[0]}"
echo go >&"${COPROC[1]}"
exec 5<"$e2b_f.out" 6<"$e2b_f.err"
some() {  # passes on one piece of a file; fails if the file has no more
  local LC_ALL=C text
  [[ -s $2 ]] || return
  if IFS= read -r -d '' -n 4096 text <&$1; then
    if ((${#text} < 4096)); then printf '%s\0' "$text"; else printf %s "$text"; fi
    dd bs=1048576 count=1 <&$1 2>/dev/null  # and not cat, which an endless writer keeps reading
  else printf %s "$text"; false; fi
}
pass() {
  local more=1
  some 5 "$e2b_f.out" && more=0
  some 6 "$e2b_f.err" >&7 && more=0
  return $more
}
trap 'kill -KILL -- -$keeper' TERM
trap 'pass; trap - USR2; kill -USR2 $$' USR2
read -r -u 8 line; echo "$keeper $line"
wait=.05
while :; do
  if read -r -t $wait -u 8 line; then break; elif (($? <= 128)); then break; fi
  if pass; then wait=.01; else wait=.25; fi
done
trap '' USR2  # it has ended, so it does not go to the background any more
if pass; then  # and no further than the files are now: what it left running may write on
  read -r -d '' out err < <(stat -c %s "$e2b_f.out" "$e2b_f.err")
  for ((n = (out > err ? out : err) >> 20; n >= 0; n--)); do pass || break; done
fi
c=137; [[ -s $e2b_f.code ]] && read -r c <"$e2b_f.code"
: >"$e2b_f.out" >"$e2b_f.err" >"$e2b_f.code"
exit "$c"
"""

_BEFORE = r"[A-Za-z_]\w*=\S*\s+|cd\s+\S+\s*(?:&&|;)\s*|sudo\s+|exec\s+"
_WORD = re.compile(rf"(?:{_BEFORE})*([\w./+-]{{1,64}})")


# The environment variables of a command's action. In the argv the program would fill every `ps`.
VARIABLES = {"TANGRAM_E2B": PROGRAM}


def argv_of(slot: int, old: Sequence[int], cwd: str, stdin: bool, command: Sequence[str]
            ) -> list[str]:
    """Returns the action's argv.

    Args:
        slot: a number that no other command of the sandbox has had; it names the files. It is not
            used again, because processes that a command has left running may still write to its
            files.
        old: the slots of ended commands, whose files are removed.
        cwd: the command's directory; empty for the session's.
        stdin: whether the command reads input that the client will send.
        command: the command's own argv.
    """
    return ["/bin/bash", "-c", 'eval "$TANGRAM_E2B"', "e2b", str(slot), " ".join(map(str, old)),
            cwd, "1" if stdin else "", *command]


@dataclass(frozen=True)
class Started:
    """The content of the watcher's first line.

    Attributes:
        group: the keeper's process id, which is the number of the command's process group.
        pid: the command's process id in its sandbox.
        folder: the folder of the command's files.
    """

    group: int
    pid: int
    folder: str


def read_first_line(line: bytes) -> Started | None:
    """Parses the watcher's first line; returns None if the command's directory cannot be entered,
    or if the line is not the watcher's."""
    words = line.decode(errors="replace").split(" ", 2)
    if len(words) != 3 or not (words[0].isdigit() and words[1].isdigit()):
        return None
    return Started(int(words[0]), int(words[1]), words[2])


def read_exit_code(data: bytes) -> int | None:
    """Returns the exit code in the keeper's file; None if the keeper has not written it yet."""
    text = data.strip()
    return int(text) if text.isdigit() and len(text) <= 3 and data.endswith(b"\n") else None


def name_of(command: Sequence[str]) -> str:
    """Returns the name of a command's first program, which is its class in accounting and in run
    time estimates."""
    line = command[-1] if len(command) > 2 and command[-2] == "-c" else command[0]
    found = _WORD.match(line.lstrip())
    return (found.group(1).rpartition("/")[2] if found else "") or "bash"
