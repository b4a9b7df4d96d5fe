"""The scripted policy: what a trajectory writes, runs and decides, and the reward that must result.

A trajectory waits for the policy, writes a draft and runs the prompt's examples. Depending on their
outcome the trajectory keeps the draft or writes another one. Then it runs the problem's own tests,
whose exit code is the reward. Each problem has a hardness that its whole group shares, so groups
differ in their rewards. All decisions are drawn from the seed beforehand, so the reward of a
trajectory is known in advance ("certain") and can be checked. This module only yields the steps; a
driver carries them out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..errors import InvalidInput
from . import harness, mutate
from .policy_latency import PolicyLatency
from .problems import Problem

GROUP = 4  # trajectories of one problem

_HARDNESS_STREAM, _MEMBER_STREAM = 0x48415244, 0x4D454D42
# Each of these values is the probability that the event in its comment happens. A pair holds the
# values for the hardest and for the easiest problem.
_FIRST_RIGHT = (0.1, 0.7)  # the first draft is right
_REPAIRED = (0.2, 0.9)  # the draft after failed examples is right
_ANOTHER = 0.5  # a repair that is not right is another wrong draft, and not the first one again
_SECOND_THOUGHTS = 0.15  # another draft is written although the examples passed


@dataclass(frozen=True, slots=True)
class Draft:
    """A module to be judged, and whether it certainly passes the tests and the examples."""

    source: str
    kind: str
    passes: bool
    examples_pass: bool


@dataclass(frozen=True, slots=True)
class StepLatencies:
    """Policy latencies of a trajectory before each of its four steps, in unscaled seconds."""

    draft_s: float
    examples_s: float
    revise_s: float
    tests_s: float

    @property
    def total_s(self) -> float:
        """Returns the sum of all latencies."""
        return self.draft_s + self.examples_s + self.revise_s + self.tests_s


@dataclass(frozen=True, slots=True)
class TrajectoryScript:
    """Everything that one trajectory will do.

    Attributes:
        task_id: Name of the problem.
        index: Number of the problem in the data file.
        member: Number of the trajectory within the problem's group.
        drafts: All drafts; the first one is written first.
        if_failed: Index of the draft after failed examples; 0 keeps the first draft.
        if_passed: Index of the draft after passed examples; 0 keeps the first draft.
        latencies: Policy latencies before the steps.
        examples_program: Text of the program that tries a draft on the examples.
        tests_program: Text of the program that judges a draft by the tests.
    """

    task_id: str
    index: int
    member: int
    drafts: tuple[Draft, ...]
    if_failed: int
    if_passed: int
    latencies: StepLatencies
    examples_program: str
    tests_program: str

    @property
    def name(self) -> str:
        """Returns the trajectory's name, which is unique within a run."""
        return f"p{self.index:03d}m{self.member}"

    @property
    def expected_examples(self) -> bool:
        """Returns whether the run of the examples certainly ends with exit code 0."""
        return self.drafts[0].examples_pass

    @property
    def expected_final(self) -> Draft:
        """Returns the draft that the tests judge; it follows from the known results of examples."""
        return self.final(self.expected_examples)

    @property
    def expected_reward(self) -> int:
        """Returns the certain reward, 0 or 1."""
        return int(self.expected_final.passes)

    def final(self, examples_passed: bool) -> Draft:
        """Returns the draft that the tests judge after this outcome of the examples."""
        return self.drafts[self.if_passed if examples_passed else self.if_failed]


@dataclass(frozen=True, slots=True)
class AwaitPolicy:
    """The step that waits this long for the policy, in unscaled seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Write:
    """The step that writes this text (UTF-8) to a file, relative to the sandbox's working
    directory.
    """

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class RunStep:
    """The step that puts `files` (path, text) into the working directory and runs `argv` there.

    It is an action. `argv[0]` names the interpreter. The driver sends the exit code into the
    generator.
    """

    kind: Literal["examples", "tests"]
    argv: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


Step: TypeAlias = AwaitPolicy | Write | RunStep


@dataclass(frozen=True, slots=True)
class TrajectoryResult:
    """The end of a trajectory.

    Attributes:
        reward: The reward that was measured.
        expected: The reward that had to result after this outcome of the examples.
        examples_passed: Outcome of the examples.
        final: The draft that was judged.
    """

    reward: int
    expected: int
    examples_passed: bool
    final: Draft


def steps(plan: TrajectoryScript, python: str = "python3") -> Generator[Step, int | None,
                                                                        TrajectoryResult]:
    """Yields the steps of a trajectory in order and returns its result.

    After a `RunStep`, send its exit code; after any other step send None.

    Raises:
        InvalidInput: None was sent after a `RunStep`.
    """
    first, latencies = plan.drafts[0], plan.latencies
    yield AwaitPolicy(latencies.draft_s)
    yield Write(harness.SOLUTION, first.source)
    yield AwaitPolicy(latencies.examples_s)
    code = yield _run("examples", python, harness.EXAMPLES, plan.examples_program)
    passed = _exit_code(code) == 0
    yield AwaitPolicy(latencies.revise_s)
    final = plan.final(passed)
    if final is not first:
        yield Write(harness.SOLUTION, final.source)
    yield AwaitPolicy(latencies.tests_s)
    code = yield _run("tests", python, harness.TESTS, plan.tests_program)
    reward = int(_exit_code(code) == 0)
    return TrajectoryResult(reward, int(final.passes), passed, final)


def _run(kind: Literal["examples", "tests"], python: str, path: str, text: str) -> RunStep:
    return RunStep(kind, (python, *harness.FLAGS, path), ((path, text),))


def _exit_code(code: int | None) -> int:
    if code is None:
        raise InvalidInput("after a RunStep send its exit code, not None")
    return code


def trajectory_plan(problem: Problem, member: int, seed: int) -> TrajectoryScript:
    """Returns the plan of one member (0, 1, ...) of a problem's group.

    The same arguments always give the same plan.

    Raises:
        InvalidInput: `member` or `seed` is negative, or the problem was not vetted.
    """
    if member < 0 or seed < 0:
        raise InvalidInput(f"member {member}, seed {seed}: both must be at least 0")
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
        latencies=_latencies(rng),
        examples_program=harness.examples_program(problem, known.drop),
        tests_program=harness.tests_program(problem),
    )


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(list(key)))


def _pool(problem: Problem) -> list[Draft]:
    """Returns the drafts that a policy may write for a problem, the canonical one first."""
    canonical = Draft(problem.solution, "canonical", passes=True, examples_pass=True)
    others = mutate.mutants(problem)
    return [canonical, *(Draft(m.source, m.kind, m.passes, m.examples_pass) for m in others)]


def _decisions(
    pool: list[Draft], ease: float, rng: np.random.Generator
) -> tuple[tuple[Draft, ...], int, int]:
    """Draws the drafts and the indices after failed and passed examples.

    The number of draws does not depend on their values, so that later draws of the same generator
    do not change with the decisions.
    """
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


def _latencies(rng: np.random.Generator) -> StepLatencies:
    sampler = PolicyLatency(rng)
    return StepLatencies(
        draft_s=sampler.draw("edit"),
        examples_s=sampler.draw("python"),
        revise_s=sampler.draw("edit"),
        tests_s=sampler.draw("test"),
    )
