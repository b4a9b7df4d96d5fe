"""The request and the answer of SandboxFusion's `/run_code`, field by field."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from .languages import LANGUAGES

TIMEOUT_MAX_S = 24 * 3600.0
FILES_MAX = 1024

_Seconds = Annotated[float, Field(gt=0, le=TIMEOUT_MAX_S, allow_inf_nan=False)]


class RunCodeRequest(BaseModel):
    """A program and how to run it; the fields are SandboxFusion's.

    Attributes:
        code: the program's text.
        language: a key of `languages.LANGUAGES`.
        compile_timeout, run_timeout: the longest time of each part, in seconds.
        memory_limit_MB: the memory that it may have, in MiB; -1 for no limit of its own.
        stdin: what it reads; None for nothing.
        files: path -> content in base64 (None for an empty file), written beside the program before
            it is compiled or run.
        fetch_files: paths of files to return.
    """

    code: str
    language: str
    compile_timeout: _Seconds = 10.0
    run_timeout: _Seconds = 10.0
    memory_limit_MB: Annotated[int, Field(ge=-1, le=1 << 24)] = -1
    stdin: str | None = None
    files: Annotated[dict[str, str | None], Field(max_length=FILES_MAX)] = {}
    fetch_files: Annotated[list[str], Field(max_length=FILES_MAX)] = []

    @field_validator("language")
    @classmethod
    def _is_offered(cls, language: str) -> str:
        if language not in LANGUAGES:
            raise ValueError(f"{language!r:.40} is not offered; offered are "
                             f"{', '.join(sorted(LANGUAGES))}")
        return language

    @field_validator("code", "stdin")
    @classmethod
    def _is_text(cls, text: str | None) -> str | None:
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair, which UTF-8 cannot hold") from None
        return text

    @field_validator("files")
    @classmethod
    def _is_base64(cls, files: dict[str, str | None]) -> dict[str, str | None]:
        for path, data in files.items():
            try:
                base64.b64decode(data or "", validate=True)
            except binascii.Error:
                raise ValueError(f"{path!r:.80} is not base64") from None
        return files

    def contents(self) -> dict[str, bytes]:
        """Returns the files, decoded."""
        return {path: base64.b64decode(data or "") for path, data in self.files.items()}


class CommandRunResult(BaseModel):
    """How one command of a program ended; the fields are SandboxFusion's.

    Attributes:
        status: `Finished` also for a program that failed; `Error` if it could not be started.
        execution_time: its run time in seconds; None if it never ran.
        return_code: its exit code, or minus the number of its signal; None after a time limit.
        stdout, stderr: its output; bytes that are not UTF-8 are replaced.
    """

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """The answer of `/run_code`; the fields are SandboxFusion's."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
