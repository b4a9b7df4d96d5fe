"""The programming languages of `/run_code`: how a program of each is compiled and run.

A program runs with the interpreter or compiler that its sandbox sees, so a language can be used
where the node (or the image) has it installed. Only the languages that `TRIED` lists were run by
the tests of this package; the commands of the others are those of the language's own manual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TRIED = frozenset({"python", "bash", "perl", "nodejs", "cpp"})


@dataclass(frozen=True)
class Language:
    """How programs of one language are run.

    Attributes:
        source: the name of the file that holds the program.
        run: the command that runs it.
        compile: the command that makes `product` of the source; empty for an interpreted language.
        product: the file that `compile` makes and that `run` needs.
    """

    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    product: str = ""


_PROGRAM = ("./program",)

LANGUAGES: Mapping[str, Language] = {
    "python": Language("sandbox_main.py", ("python3", "sandbox_main.py")),
    "bash": Language("sandbox_main.sh", ("bash", "sandbox_main.sh")),
    "perl": Language("sandbox_main.pl", ("perl", "sandbox_main.pl")),
    "nodejs": Language("sandbox_main.js", ("node", "sandbox_main.js")),
    "php": Language("sandbox_main.php", ("php", "-f", "sandbox_main.php")),
    "lua": Language("sandbox_main.lua", ("lua", "sandbox_main.lua")),
    "ruby": Language("sandbox_main.rb", ("ruby", "sandbox_main.rb")),
    "R": Language("sandbox_main.R", ("Rscript", "sandbox_main.R")),
    "julia": Language("sandbox_main.jl", ("julia", "sandbox_main.jl")),
    "cpp": Language("main.cpp", _PROGRAM,
                    ("g++", "-std=c++17", "-O2", "main.cpp", "-o", "program", "-lpthread"),
                    "program"),
    "go": Language("main.go", _PROGRAM, ("go", "build", "-o", "program", "main.go"), "program"),
    "rust": Language("main.rs", _PROGRAM, ("rustc", "-O", "main.rs", "-o", "program"), "program"),
    "java": Language("Main.java", ("java", "-jar", "program.jar"),
                     ("sh", "-c", "javac -d classes Main.java && "
                                  "jar cfe program.jar Main -C classes ."), "program.jar"),
}
