"""mini-swe-agent's environment: each instance has a session of the job's broker.

Name the class in the configuration (`environment_class:
tangram_hpc.hooks.mini_swe_agent.MiniSweEnvironment`), or run mini-swe-agent's own programs so that
they use sessions instead of Docker:

    python -m tangram_hpc.hooks.mini_swe_agent swebench --subset verified --workers 64 ...

The second way exists because `swebench` gives an instance's image only to environments whose short
names it knows, such as `docker`; a class that is named by its path would get no image. `stand_in`
does the same within a program of your own. This module imports mini-swe-agent only in `stand_in`,
`main` and at the end of an agent's work. It was run with mini-swe-agent 2.4.6.
"""

from __future__ import annotations

import concurrent.futures
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import tangram_hpc
from tangram_hpc.errors import InvalidInput, how_to_install

from .harness.harness_session import cpus_of, most_output, stderr_of, why_unsendable
from .harness.session_options import session_options, take_session_options
from .process_client import SessionSlot

_CLASS = "tangram_hpc.hooks.mini_swe_agent.MiniSweEnvironment"
_SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_MACHINE = ("system", "node", "release", "version", "machine", "processor")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# options of Docker's environment that are accepted and not used, so that its configurations work
_IGNORED = ("executable", "run_args", "sandbox_build_retries")


@dataclass
class MiniSweEnvironmentConfig:
    """The configuration of an environment; the agent's templates see what `model_dump` returns.

    Attributes:
        image: the image, as for `Client.session`; empty for the node's own file system.
        cwd: the working directory of commands; empty for the session's own.
        env: environment variables of all commands.
        forward_env: names of this process's variables that commands get too, if they are set.
        timeout: the longest run time of a command, in seconds.
        interpreter: the argv before the command line.
        container_timeout: how long the session may stay open, as `sleep` takes it, such as "2h".
        pull_timeout: how long the session may take to open, in seconds; 0 for no limit, which is
            the default, because waiting for memory counts too.
        cpus: cores that a command may use at most.
        session: other arguments of `Client.session`, such as `mem` and `backend`.
    """

    image: str = ""
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    forward_env: list[str] = field(default_factory=list)
    timeout: float = 30
    interpreter: list[str] = field(default_factory=lambda: ["bash", "-lc"])
    container_timeout: str = "2h"
    pull_timeout: float = 0
    cpus: float = 1
    session: dict[str, Any] = field(default_factory=dict)

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        """Returns the fields by name, as plain values."""
        return asdict(self)


class MiniSweEnvironment:
    """One session of a broker, in which one agent runs its commands.

    Args:
        options: the fields of `MiniSweEnvironmentConfig`, and arguments of `Client.session` beside
            them.

    The session ends with `cleanup`, or when the environment is garbage-collected.

    Attributes:
        config: the configuration.

    Raises:
        InvalidInput: a key, or a key of `session`, is unknown or has a wrong value.
        InfeasibleRequest: no node can ever hold the session.
        TimeoutError: the session did not open within `pull_timeout`.
        FileFailed: one of the session's `files` cannot be written.
    """

    def __init__(self, **options: Any) -> None:
        self._slot = SessionSlot(self)
        image = options.pop("image", "") or ""
        options = {key: value for key, value in options.items() if key not in _IGNORED}
        session = take_session_options(options, background="run", network=False)
        session.update(session_options(options.pop("session", None)))
        known = [each.name for each in fields(MiniSweEnvironmentConfig)]
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidInput(f"environment: {unknown[0]}: no such key; the keys are "
                               f"{', '.join(known)} and arguments of Client.session")
        if isinstance(options.get("interpreter"), str):
            raise InvalidInput(f"environment: interpreter: {options['interpreter']!r} is not a "
                               'list of words, such as ["bash", "-lc"]')
        self.config = MiniSweEnvironmentConfig(image=_plain(image), session=session, **options)
        ttl = {"ttl_s": _duration(self.config.container_timeout)}
        opening = self._slot.open({"image": self.config.image, "env": self.config.env, **ttl,
                                   **session})
        try:
            opening.opened.result(self.config.pull_timeout or None)
            for each in opening.first:
                each.result()
        except concurrent.futures.TimeoutError:
            self.cleanup()
            raise TimeoutError("the session was not open within pull_timeout: "
                               f"{self.config.pull_timeout:g} s") from None
        except BaseException:
            self.cleanup()
            raise

    @property
    def session(self) -> tangram_hpc.Session | None:
        """The session; None after `cleanup`."""
        return self._slot.session

    def execute(self, action: Mapping[str, Any], cwd: str = "", *,
                timeout: float | None = None) -> dict[str, Any]:
        """Runs the command of an action.

        Args:
            action: its `command` is a command line.
            cwd: the working directory; empty for the configured one.
            timeout: the longest run time in seconds; None for the configured one. Waiting for
                cores does not count.

        Returns:
            `output`, which is stdout and stderr in one text; `returncode`, which is -1 after a
            time-out and for a command that is no UTF-8; `exception_info`, which is empty or says
            what went wrong; and `extra`, where `returncode` is -1.

        Raises:
            Submitted: the command printed the line that ends the agent's work.
            InvalidInput: the environment was cleaned up.
            SessionLost: the session has ended, for example with its node.
            KeyboardInterrupt: the wait was interrupted; the command is ended.
        """
        if self.session is None:
            raise InvalidInput("execute: the environment was cleaned up; make a new one")
        limit = timeout or self.config.timeout
        command = str(action.get("command", ""))
        if why := why_unsendable(command):
            return _failed("UnicodeEncodeError", why)
        # as with a terminal, the order of what goes to stdout and to stderr is kept
        words = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *self.config.interpreter, command]
        running = self.session.exec(
            words, cwd=cwd or self.config.cwd, env=self._forwarded(), timeout=limit,
            cpus=cpus_of(self.config.cpus), output_max=most_output(self.session), keep="both")
        try:
            result = running.result()
        except KeyboardInterrupt:  # the interactive agent goes on after it
            running.cancel()
            raise
        output = result.text + stderr_of(result)
        if result.state is tangram_hpc.ActionState.TIMEOUT:
            return _failed("TimeoutExpired", f"the command timed out after {limit:g} seconds",
                           result.text)
        told = {"output": output, "returncode": result.exit_code, "exception_info": ""}
        _raise_if_submitted(told)
        return told

    def _forwarded(self) -> dict[str, str]:
        return {name: os.environ[name] for name in self.config.forward_env
                if name in os.environ and name not in self.config.env}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Returns the variables of the agent's templates: the configuration, the machine, and
        `more`."""
        machine = platform.uname()
        about = {name: getattr(machine, name) for name in _MACHINE}
        return {**self.config.model_dump(), **about, **more}

    def serialize(self) -> dict[str, Any]:
        """Returns the part of a trajectory's file that describes the environment."""
        about = {**self.config.model_dump(), "session": dict(self.config.session)}
        return {"info": {"config": {"environment": about, "environment_type": _CLASS}}}

    def cleanup(self) -> None:
        """Closes the session. A second call does nothing."""
        self._slot.close()


def stand_in(*names: str) -> None:
    """Makes mini-swe-agent use sessions where its configuration names another environment.

    Args:
        names: short names of environments, such as "docker". Without names these are "docker",
            "swerex_modal" and "singularity", to which `swebench` gives an instance's image.
    """
    from minisweagent.environments import _ENVIRONMENT_MAPPING as known

    for name in names or ("docker", "swerex_modal", "singularity"):
        known[name] = _CLASS


def _failed(kind: str, why: str, output: str = "") -> dict[str, Any]:
    """Returns the answer to an action whose command had no exit code, as mini-swe-agent's own
    environments give it."""
    return {"output": output, "returncode": -1,
            "exception_info": f"An error occurred while executing the command: {why}",
            "extra": {"exception_type": kind, "exception": why}}


def _raise_if_submitted(told: Mapping[str, Any]) -> None:
    lines = told["output"].lstrip().splitlines(keepends=True)
    if told["returncode"] == 0 and lines and lines[0].strip() == _SUBMITTED:
        from minisweagent.exceptions import Submitted

        text = "".join(lines[1:])
        raise Submitted({"role": "exit", "content": text,
                         "extra": {"exit_status": "Submitted", "submission": text}})


def _plain(image: str) -> str:
    """Returns an image's name without the prefix that mini-swe-agent adds for Singularity."""
    return image.removeprefix("docker://")


def _duration(text: str | float) -> float:
    """Returns the seconds of a duration in the form that `sleep` takes. Raises InvalidInput."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text))
    if found is None:
        raise InvalidInput(f"container_timeout: {text!r} is no duration; write 90, 30m or 2h")
    return float(found[1]) * _SECONDS[found[2]]


def main(words: Sequence[str] | None = None) -> None:
    """Runs mini-swe-agent's `mini-extra` with sessions instead of Docker's containers.

    Args:
        words: the command line after `mini-extra`; None for this process's command line.
    """
    import sys

    try:
        from minisweagent.run.utilities.mini_extra import main as mini_extra
    except ImportError as error:
        raise SystemExit(f"tangram: mini-swe-agent cannot be imported ({error}): "
                         f"{how_to_install('mini-swe-agent')}") from None
    if words is not None:
        sys.argv[1:] = words
    stand_in()
    mini_extra()


if __name__ == "__main__":
    main()
