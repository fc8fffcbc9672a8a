"""What an experiment is: a claim, measured points, a drawing, and a verdict computed from the points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

HOLDS, FAILS, OPEN = "holds", "does not hold here", "not shown"


@dataclass(frozen=True)
class Point:
    """One measurement: a module-level function and its arguments, the seed among them.

    Attributes:
        key: unique within its experiment; a finished key is not measured again.
        function: returns a dict that JSON can hold.
    """

    key: str
    function: Callable[..., dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether the claim held: one of `HOLDS`, `FAILS`, `OPEN`, and the numbers that say so in a sentence."""

    word: str
    because: str


# Point key -> what its function returned, with its arguments under "arguments".
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """One claim of the story.

    Attributes:
        points: what to measure at a budget ("small" or "medium").
        judge: the verdict, from complete results.
        draw: matplotlib figure(s), from complete results.
        alone: times something, so nothing else may run beside it.
    """

    name: str
    title: str
    claim: str
    method: str
    points: Callable[[str], list[Point]]
    judge: Callable[[Results], Verdict]
    draw: Callable[[Results], Any]
    alone: bool = False


def select(results: Results, **arguments: Any) -> list[dict[str, Any]]:
    """The results whose arguments agree with all that are given."""
    return [r for r in results.values() if all(r["arguments"].get(k) == v for k, v in arguments.items())]


def values_of(results: Results, name: str) -> list[Any]:
    """The distinct values of an argument, in the order of the points."""
    return list(dict.fromkeys(r["arguments"][name] for r in results.values()))


def mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers)
