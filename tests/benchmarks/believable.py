"""Whether the figures of an ablation can be believed: its statistics on simulated sweeps.

The truth is known in a simulation: how often arms that are equal are called different, how often an
interval holds what it should, what a sweep costs that stops early. Every figure comes from the
functions that `python train.py -m` uses.

Shapes: R sweeps, A arms (the baseline first), S seeds, E examples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm

from tests.benchmarks.measure import circumstances, write
from tests.benchmarks.simulations import (
    ARMS,
    EXAMPLES,
    MOST,
    PARTS,
    TRUTHS,
    Simulation,
    counted,
    curves,
    differences,
    equal_power,
    paired_p,
    percent,
    replies,
    stopped_sweeps,
    table,
)
from wherelm.ablation.inference import intervals, sequential
from wherelm.ablation.inference.effects import deciding, effective_speedup
from wherelm.ablation.inference.intervals import LEVEL, two_sided, variances

SWEEPS, QUICK_SWEEPS = 2000, 300
SEEDS = (3, 5, 10)
ACCURACIES = (0.9995, 0.999, 0.998, 0.99, 0.9)
LOOKS = tuple(range(5, 21))
LOOKS_TWICE = 100_000  # sweeps: a draw of these costs next to nothing


def equal_arms(simulation: Simulation, bar: tqdm) -> list[str]:
    rows = []
    for accuracy in ACCURACIES:
        for spread in (0.0, 0.1):
            row = [f"{accuracy:g}", "none" if not spread else f"{spread:g}"]
            for seeds in SEEDS:
                generator = simulation.generator(1, int(1e4 * accuracy), int(10 * spread), seeds)
                alone, wrong, whole = 0, 0, simulation.sweeps
                for sweeps in simulation.chunks(ARMS * seeds * EXAMPLES):
                    right = replies(generator, sweeps, seeds, accuracy, spread).astype(np.int8)
                    found = variances(right[:, 1:] - right[:, :1], np.ones(EXAMPLES), unit=1.0)
                    with np.errstate(divide="ignore", invalid="ignore"):
                        p_seeds = two_sided(found.mean, np.sqrt(found.seeds), seeds - 1)
                    p_seeds = np.where(found.mean == 0, 1.0, p_seeds)
                    p = two_sided(found.mean, np.sqrt(found.examples), EXAMPLES - 1)
                    bound = intervals.bonferroni(ARMS - 1)
                    alone += int((p_seeds <= bound).any(1).sum())
                    wrong += int((np.maximum(p_seeds, p) <= bound).any(1).sum())
                row.append(f"{percent(wrong / whole)} ({percent(alone / whole)})")
                bar.update()
            rows.append(row)
    return [
        "## Equal arms that are called different",
        "",
        f"Nine arms that are truly equal to the baseline, exact match on {EXAMPLES:,} examples, "
        "Holm's correction: sweeps in which any arm is called different. In brackets: by Student's "
        "t over seeds alone, which takes seeds that agree by chance for certainty. The spread is "
        "that of whole runs, beside that of single replies. Must: at most 5 %.",
        "",
        *table(["true accuracy", "spread", *(f"{s} seeds" for s in SEEDS)], rows),
    ]


def coverage(simulation: Simulation, bar: tqdm) -> list[str]:
    from scipy.special import stdtrit

    cases = {name: lambda *of, p=p: differences(*of, p) for name, p in PARTS.items()}
    for accuracy in (0.99, 0.9):
        name = f"replies, {accuracy:.0%} right, examples differ"
        cases[name] = lambda *of, a=accuracy: counted(*of, a)
    rows = []
    for number, (name, draw) in enumerate(cases.items()):
        row = [name]
        for seeds in SEEDS:
            generator, examples = simulation.generator(2, number, seeds), EXAMPLES // 2
            held = shown = 0
            for sweeps in simulation.chunks(seeds * examples):
                drawn = draw(generator, sweeps, seeds)
                known = intervals.differing(drawn) >= intervals.FEWEST_DIFFERING
                found = variances(drawn, np.ones(examples))
                freedom = intervals.freedom_of_both(found, seeds, examples)
                reach = stdtrit(freedom, 1 - LEVEL / 2) * np.sqrt(found.both)
                held += int((np.abs(found.mean) <= reach)[known].sum())
                shown += int(known.sum())
            row.append(percent(held / shown))
            bar.update()
        rows.append(row)
    return [
        "## The interval over seeds and examples",
        "",
        f"How often the 95 % interval holds the truth for new seeds and {EXAMPLES // 2} new "
        "examples. Must: 93 to 97 %.",
        "",
        *table(["what a difference varies by", *(f"{s} seeds" for s in SEEDS)], rows),
    ]


def looking_twice(simulation: Simulation, bar: tqdm) -> list[str]:
    ways = {
        "at 5 % each time": lambda seen: intervals.bonferroni,
        "nobody said how many looks there would be": sequential.critical_now,
        "10 seeds announced": lambda seen: sequential.critical_now(seen, SEEDS[-1]),
    }
    rows = []
    for name, way in ways.items():
        row = [name]
        for arms in (1, 9):
            p_after = paired_p(simulation.generator(3, arms), (0.0,) * arms, LOOKS_TWICE, SEEDS[-1])
            called = np.zeros(LOOKS_TWICE, dtype=bool)
            for look, seeds in enumerate(SEEDS):
                called |= p_after(seeds).min(1) <= way(SEEDS[: look + 1])(arms)
                row += [percent(called.mean())] if look in (0, 2) else []
            bar.update()
        rows.append(row)
    head = ["level", "one arm, 3 seeds", "then 5, then 10", "nine arms, 3 seeds", "then 5, then 10"]
    return [
        "## Looking twice",
        "",
        f"Equal arms ({LOOKS_TWICE:,} sweeps), and a sweep that goes on with more seeds in the "
        "same folder until any arm is called different. Must: at most 5 %.",
        "",
        *table(head, rows),
    ]


def seeds_needed(simulation: Simulation, bar: tqdm) -> list[str]:
    rows = []
    for number, (contrasts, seeds) in enumerate([(1, 3), (1, 5), (9, 3), (9, 5), (9, 10)]):
        level = LEVEL / contrasts
        size = sequential.detectable(1.0, seeds, level)
        generator = simulation.generator(4, number)
        p = paired_p(generator, (size,), 10 * simulation.sweeps, seeds)(seeds)
        rows.append([str(contrasts), str(seeds), f"{size:.2f}", percent((p <= level).mean())])
        bar.update()
    pilots = []
    for arms, seeds in ((2, 2), (4, 2), (10, 2), (4, 1), (10, 1)):
        generator, level = simulation.generator(5, arms, seeds), LEVEL / (arms - 1)
        powers, needed = [], []
        for _ in range(simulation.sweeps // 4):
            spread = sequential.pilot_spread(generator.standard_normal((arms, seeds)) / np.sqrt(2))
            needed.append(sequential.seeds_needed(spread.upper, 1.0, level))
            powers.append(sequential.power(1.0, 1.0, needed[-1], level))
        true = sequential.seeds_needed(1.0, 1.0, level)
        enough = np.mean(np.array(powers) >= sequential.POWER)
        pilots.append([f"{arms} × {seeds}", str(true), f"{np.median(needed):.0f}"])
        pilots[-1] += [percent(enough), percent(np.mean(powers))]
        bar.update()
    return [
        "## Seeds needed",
        "",
        "The difference that the plan promises to find with 80 %, in standard deviations of a "
        "single paired difference, and how often it is found.",
        "",
        *table(["contrasts", "seeds", "difference", "found"], rows),
        f"Pilots ({simulation.sweeps // 4:,} of each) whose arms are equal, and the seeds that the "
        "plan then asks for to find a difference of 1 (from the spread's upper 80 % limit): how "
        "often they are enough, and how often the difference is found on average.",
        "",
        *table(["pilot, arms × seeds", "needed", "asked, median", "enough", "found"], pilots),
    ]


def stopping(simulation: Simulation, bar: tqdm) -> list[str]:
    rows = []
    for number, (name, truth) in enumerate(TRUTHS.items()):
        differ = np.array(truth) != 0
        p_after = paired_p(simulation.generator(6, number), truth, simulation.sweeps, MOST)
        called, jobs = stopped_sweeps(p_after, LOOKS, simulation.sweeps, len(truth))
        per_sweep = jobs / simulation.sweeps
        row = [name, percent(called[:, ~differ].any(1).mean()) if not differ.all() else "–"]
        if differ.any():
            share = float(called[:, differ].mean())
            fixed = equal_power(p_after, differ, share) * (len(truth) + 1)
            row += [percent(share, 0), f"{per_sweep:.0f}", f"{fixed:.0f}"]
            row += [percent(1 - per_sweep / fixed, 0)]
        else:
            fixed = LOOKS[-1] * (len(truth) + 1)
            row += ["–", f"{per_sweep:.0f}", f"{fixed} (all)", percent(1 - per_sweep / fixed, 0)]
        rows.append(row)
        bar.update()
    return [
        "## Stopping the arms that are decided",
        "",
        "`ablation.seeds=5-20`: a look after every seed. The fixed design has "
        "as many seeds for every arm as tell as many of the differing arms apart; the baseline's "
        "jobs count in both. Differences in standard deviations of a single paired difference. "
        "Must: errors in at most 5 % of sweeps, 30 % fewer jobs.",
        "",
        *table(["truth", "errors", "found", "jobs", "fixed design", "fewer"], rows),
        "Where all arms differ alike, none is decided long before the others, and few jobs are "
        "saved: what is saved is that of clear differences and of none.",
        "",
    ]


def verdicts(simulation: Simulation, bar: tqdm) -> list[str]:
    rows = []
    for name, truth in (
        ("none differs", (0.0,) * 9),
        ("all differ by the margin, 1", (1.0,) * 9),
        ("differences from 0 to 2", TRUTHS["nine arms, differences from 0 to 2"]),
    ):
        for seeds in (5, 10):
            generator = simulation.generator(7, seeds, round(10 * sum(truth)))
            called_equal = missed = 0
            for _ in range(simulation.sweeps):
                figures = generator.standard_normal((10, seeds)) / np.sqrt(2)
                of_seed = figures[1:] - figures[0] + np.array(truth)[:, None]
                found = [intervals.t_interval(one) for one in of_seed]
                ends = intervals.simultaneous(found)
                missed += any(not a <= t <= b for (a, b), t in zip(ends, truth, strict=True))
                level = intervals.bonferroni(9)
                beyond = [o for o, t in zip(found, truth, strict=True) if t >= 1]
                called_equal += any(one.equal_p(1.0) <= level for one in beyond)
            row = [name, str(seeds), percent(1 - missed / simulation.sweeps)]
            rows.append([*row, percent(called_equal / simulation.sweeps) if max(truth) else "–"])
            bar.update()
    return [
        "## Intervals that hold together, and equality",
        "",
        "Nine arms: how often all adjusted 95 % intervals hold their truth, and how often any arm "
        "that differs by the margin or more is called equal. Must: 95 % at least, 5 % at most.",
        "",
        *table(["truth", "seeds", "all intervals hold", "called equal"], rows),
    ]


def speedups(simulation: Simulation, bar: tqdm) -> list[str]:
    rows, targets = [], np.linspace(0.1, 1.0, 10)
    for worth in (0.0, 0.12, 0.5):
        for seeds in (3, 5):
            generator = simulation.generator(8, int(100 * worth), seeds)
            held, found = 0, []
            for _ in range(simulation.sweeps):
                pairs = curves(generator, targets, seeds, worth)
                speedup = effective_speedup(*pairs)
                held += speedup.low <= worth <= speedup.high
                found.append(speedup.worth)
            row = [percent(worth, 0), str(seeds), percent(np.median(found))]
            rows.append([*row, percent(held / simulation.sweeps)])
            bar.update()
    return [
        "## Effective speedup",
        "",
        "Curves of ten evaluations that fall as the square root of training, with the luck of the "
        "run and of the evaluation; the arm learns as if it had been trained longer.",
        "",
        *table(["true worth", "seeds", "found, median", "95 % interval holds"], rows),
    ]


def messages(simulation: Simulation, bar: tqdm) -> list[str]:
    rows = []
    for name, lead, planted in (
        ("equal arms", 0.0, 0),
        ("a lead in all examples alike", 0.3, 0),
        ("20 examples that the arm wins by 3", 0.0, 20),
    ):
        for seeds in (3, 5):
            generator = simulation.generator(9, int(10 * lead), planted, seeds)
            small = claimed = 0
            for _ in range(simulation.sweeps // 4):
                better = generator.standard_normal((seeds, EXAMPLES)) + lead
                better[:, :planted] += 3
                wins, _ = deciding(better, generator)
                small += wins.p <= LEVEL
                claimed += len(wins.examples) - wins.by_chance
            runs = simulation.sweeps // 4
            rows.append([name, str(seeds), percent(small / runs), f"{claimed / runs:+.1f}"])
            bar.update()
    return [
        "## Messages that decide",
        "",
        f"Of {EXAMPLES:,} examples those that the arm wins with every seed "
        f"({simulation.sweeps // 4:,} sweeps): how often p ≤ 5 %, and how many more there are than "
        "by chance.",
        "",
        *table(["truth", "seeds", "p ≤ 5 %", "more than by chance"], rows),
    ]


PARTS_OF_PAGE = (
    (equal_arms, 30),
    (coverage, 21),
    (looking_twice, 6),
    (seeds_needed, 10),
    (stopping, 5),
    (verdicts, 6),
    (speedups, 6),
    (messages, 6),
)


def report(simulation: Simulation) -> str:
    lines = [
        "# Whether the figures can be believed",
        "",
        f"{simulation.sweeps:,} simulated sweeps, whose truth is known, for every figure where "
        "nothing else is said. A share of 5 % scatters by "
        f"±{100 * 2 * np.sqrt(0.05 * 0.95 / simulation.sweeps):.1f} % at this number of sweeps.",
        "",
    ]
    with tqdm(
        total=sum(units for _, units in PARTS_OF_PAGE), desc="believable", disable=None
    ) as bar:
        for part, _ in PARTS_OF_PAGE:
            lines += part(simulation, bar)
    return "\n".join([*lines, circumstances("believable", torch.device("cpu"), ["scipy"]), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.believable", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_SWEEPS} sweeps, and no page is written"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        print(report(Simulation(QUICK_SWEEPS)))
    else:
        write(report(Simulation(SWEEPS)), "believable")
    return 0


if __name__ == "__main__":
    sys.exit(main())
