"""The plan of a sweep, sealed before its first job, and whether its rule was kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherelm.ablation.inference.intervals import Interval, t_interval
from wherelm.run_folder import write_json

FILE = "plan.json"
CLAUSE = re.compile(r"\s*(.+?)\s*(<=|>=|<|>|≤|≥)\s*(.+?)\s*")


@dataclass(frozen=True)
class Clause:
    """`arm` is predicted to lie below (or above) a number or another arm, by the metric."""

    arm: str
    below: bool
    than: float | str

    def __str__(self) -> str:
        return f"{self.arm} {'<=' if self.below else '>='} {self.than}"


def clauses(rule: str) -> list[Clause]:
    """The clauses of a rule such as "alibi <= 1.05; rope > 1.3; sinusoidal > rope".

    ValueError names the one that cannot be read.
    """
    result = []
    for part in rule.split(";"):
        found = CLAUSE.fullmatch(part)
        if found is None:
            raise ValueError(
                f"ablation.rule={rule}: {part.strip()!r} cannot be read; expected clauses such as "
                '"alibi <= 1.05; rope > sinusoidal"'
            )
        arm, sign, than = found.groups()
        with contextlib.suppress(ValueError):
            than = float(than)
        result.append(Clause(arm, sign[0] in "<≤", than))
    return result


def expect_arms(rule: str, arms: Sequence[str]) -> None:
    """ValueError where a rule speaks of an arm that the sweep does not have."""
    for clause in clauses(rule):
        for name in (clause.arm, clause.than):
            if isinstance(name, str) and name not in arms:
                raise ValueError(
                    f"ablation.rule={rule}: no arm is called {name}; expected {', '.join(arms)}"
                )


def seal(folder: Path, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Adds a plan to plan.json with a hash of all it says, unless it is the newest there already.

    Returns every plan that the folder has had: a changed plan is a new one, and none is forgotten.
    """
    path = folder / FILE
    plans = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
    if not plans or plans[-1]["hash"] != digest:
        sealed = time.strftime("%Y-%m-%d %H:%M:%S")
        plans.append({**plan, "sealed": sealed, "hash": digest})
        write_json(path, plans)
    return plans


def judged(clause: Clause, values: Mapping[str, Mapping[int, float]]) -> str:
    """kept, broken or undecided: where the 95 % interval lies, by the values of each arm and seed.

    Two arms are compared on the seeds that both have.
    """
    own = values.get(clause.arm, {})
    if isinstance(clause.than, str):
        other = values.get(clause.than, {})
        differences = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
    else:
        differences = [value - clause.than for value in own.values()]
    interval: Interval | None = t_interval(differences)
    if interval is None or interval.low <= 0 <= interval.high:
        return "undecided"
    return "kept" if (interval.high < 0) == clause.below else "broken"


def verdict(rule: str, values: Mapping[str, Mapping[int, float]]) -> tuple[str, list[str]]:
    """The rule as a whole (broken where any clause is, kept where all are), and a line a clause."""
    found = [(clause, judged(clause, values)) for clause in clauses(rule)]
    lines = [f"{clause}: {what}" for clause, what in found]
    whats = {what for _, what in found}
    whole = "broken" if "broken" in whats else "undecided" if "undecided" in whats else "kept"
    return whole, lines
