"""Pure. Owns: what the scripted policy of one trajectory writes, runs and decides, and the reward
that is certain at its end. Must not run or wait for anything: a driver carries the steps out.

A trajectory: think, write a draft, think, run the examples; look at the outcome; think, maybe write
another draft, think, run the problem's own tests, whose exit code is the reward. Each problem has a
hardness of its own, shared by its group, so groups differ in their rewards.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..errors import InvalidInput
from . import harness, mutate
from .problems import Problem
from .think import ThinkTimes

GROUP = 4  # trajectories of one problem

_HARDNESS_STREAM, _MEMBER_STREAM = 0x48415244, 0x4D454D42
_FIRST_RIGHT = (0.1, 0.7)  # chance that the first draft is right: hardest, easiest problem
_REPAIRED = (0.2, 0.9)  # chance that failed examples lead to the right draft
_ANOTHER = 0.5  # chance that a failed repair writes a different draft at all
_SECOND_THOUGHTS = 0.15  # chance that passed examples are doubted and another draft is written


@dataclass(frozen=True, slots=True)
class Draft:
    """A module to be judged. What its two runs surely do: `examples_pass`, `passes` (the tests)."""

    source: str
    kind: str
    passes: bool
    examples_pass: bool


@dataclass(frozen=True, slots=True)
class Thinking:
    """Unscaled seconds of thinking before each of the four things that a trajectory does."""

    draft_s: float
    examples_s: float
    revise_s: float
    tests_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.draft_s + self.examples_s + self.revise_s + self.tests_s


@dataclass(frozen=True, slots=True)
class TrajectoryScript:
    """All that one trajectory will do. `drafts[0]` is written first; after the examples' run it is
    kept or replaced by `drafts[if_failed]` or `drafts[if_passed]` (0: kept).
    """

    task_id: str
    index: int
    member: int
    drafts: tuple[Draft, ...]
    if_failed: int
    if_passed: int
    thinking: Thinking
    examples_program: str
    tests_program: str

    @property
    def name(self) -> str:
        """The trajectory's name, unique within a run."""
        return f"p{self.index:03d}m{self.member}"

    @property
    def expected_examples(self) -> bool:
        """Whether the examples' run surely ends with exit code 0."""
        return self.drafts[0].examples_pass

    @property
    def expected_final(self) -> Draft:
        """The draft that the tests will surely judge."""
        return self.final(self.expected_examples)

    @property
    def expected_reward(self) -> int:
        """The certain reward, 0 or 1."""
        return int(self.expected_final.passes)

    def final(self, examples_passed: bool) -> Draft:
        """The draft that the tests judge after this outcome of the examples' run."""
        return self.drafts[self.if_passed if examples_passed else self.if_failed]


@dataclass(frozen=True, slots=True)
class Think:
    """The policy thinks this long (unscaled seconds)."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Write:
    """A file of the sandbox, relative to its working directory, gets this text (UTF-8)."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class RunStep:
    """An action: put `files` (path, text) into the working directory, run `argv` there.

    `argv[0]` names the interpreter. The driver sends the exit code into the generator.
    """

    kind: Literal["examples", "tests"]
    argv: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


Step: TypeAlias = Think | Write | RunStep


@dataclass(frozen=True, slots=True)
class TrajectoryResult:
    """What a trajectory came to: the reward seen and the one that was certain on this branch."""

    reward: int
    expected: int
    examples_passed: bool
    final: Draft


def steps(plan: TrajectoryScript, python: str = "python3") -> Generator[Step, int | None,
                                                                        TrajectoryResult]:
    """The steps of a trajectory in order; the generator's return value is its `TrajectoryResult`.

    After a `RunStep`, send its exit code; after anything else send nothing (or None). Raises
    `InvalidInput` if a `RunStep` is answered without an exit code.
    """
    first, thinking = plan.drafts[0], plan.thinking
    yield Think(thinking.draft_s)
    yield Write(harness.SOLUTION, first.source)
    yield Think(thinking.examples_s)
    code = yield _run("examples", python, harness.EXAMPLES, plan.examples_program)
    passed = _exit_code(code) == 0
    yield Think(thinking.revise_s)
    final = plan.final(passed)
    if final is not first:
        yield Write(harness.SOLUTION, final.source)
    yield Think(thinking.tests_s)
    code = yield _run("tests", python, harness.TESTS, plan.tests_program)
    reward = int(_exit_code(code) == 0)
    return TrajectoryResult(reward, int(final.passes), passed, final)


def _run(kind: Literal["examples", "tests"], python: str, path: str, text: str) -> RunStep:
    return RunStep(kind, (python, *harness.FLAGS, path), ((path, text),))


def _exit_code(code: int | None) -> int:
    if code is None:
        raise InvalidInput("a Run must be answered with its exit code")
    return code


def trajectory_plan(problem: Problem, member: int, seed: int) -> TrajectoryScript:
    """The plan of one member (0, 1, ...) of a problem's group; the same for the same arguments.

    Raises `InvalidInput` for a negative `member` or `seed`, or a problem that was not vetted.
    """
    if member < 0 or seed < 0:
        raise InvalidInput(f"member and seed must not be negative: {member}, {seed}")
    rng = _rng(seed, _MEMBER_STREAM, problem.index, member)
    ease = float(_rng(seed, _HARDNESS_STREAM, problem.index).random())
    known = mutate.facts(problem)
    drafts, if_failed, if_passed = _decisions(_pool(problem), ease, rng)
    return TrajectoryScript(
        task_id=problem.task_id,
        index=problem.index,
        member=member,
        drafts=drafts,
        if_failed=if_failed,
        if_passed=if_passed,
        thinking=_thinking(rng),
        examples_program=harness.examples_program(problem, known.drop),
        tests_program=harness.tests_program(problem),
    )


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(list(key)))


def _pool(problem: Problem) -> list[Draft]:
    """The drafts that a policy may write for a problem; the canonical one first."""
    canonical = Draft(problem.solution, "canonical", passes=True, examples_pass=True)
    others = mutate.mutants(problem)
    return [canonical, *(Draft(m.source, m.kind, m.passes, m.examples_pass) for m in others)]


def _decisions(
    pool: list[Draft], ease: float, rng: np.random.Generator
) -> tuple[tuple[Draft, ...], int, int]:
    """Draws the drafts and the rule. Always the same number of draws, whatever they say."""
    right, wrong, repaired, other, another, doubts, second = rng.random(7)
    canonical, mutants = pool[0], pool[1:]
    first = canonical if right < _between(_FIRST_RIGHT, ease) else _pick(mutants, wrong)
    if repaired < _between(_REPAIRED, ease):
        on_failure = canonical
    else:
        on_failure = _pick(mutants, other) if another < _ANOTHER else first
    on_success = _pick(pool, second) if doubts < _SECOND_THOUGHTS else first
    drafts = tuple(dict.fromkeys((first, on_failure, on_success)))
    return drafts, drafts.index(on_failure), drafts.index(on_success)


def _between(ends: tuple[float, float], share: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * share


def _pick(drafts: list[Draft], level: float) -> Draft:
    return drafts[int(level * len(drafts))]


def _thinking(rng: np.random.Generator) -> Thinking:
    times = ThinkTimes(rng)
    return Thinking(
        draft_s=times.draw("edit"),
        examples_s=times.draw("python"),
        revise_s=times.draw("edit"),
        tests_s=times.draw("test"),
    )
