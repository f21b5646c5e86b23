"""The course of a sweep: tuning, a pilot, and the jobs that are compared, as many as it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wherelm.ablation import plan, tuning, verdict
from wherelm.ablation.inference.sequential import Looks
from wherelm.ablation.plan import AblationConfig, Arm, Job, make_job
from wherelm.ablation.progress import Progress


@dataclass
class Course:
    """What a sweep does, one after the other; `launch` runs those of some jobs that are missing.

    `jobs` are all that belong to it so far. `shares` is what each arm trains of the configured
    length. `decided` are the arms that a range of seeds has told apart, None with a fixed number.
    """

    folder: Path
    arms: Sequence[Arm]
    settings: AblationConfig
    launch: Callable[[Sequence[Job]], None]
    progress: Progress
    shares: Mapping[str, float] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    decided: list[str] | None = None

    @property
    def first(self) -> int:
        """The first seed of the jobs that are compared."""
        return self.arms[0].config["seed"]

    def run(self, parallel: int) -> None:
        """All of it; `parallel` jobs run at a time."""
        if self.settings.tune:
            self.tune()
        if self.settings.pilot:
            self.pilot(parallel)
        verdict.sealed(self.folder, self.settings, self.arms)
        self.final()

    def jobs_of(self, arms: Sequence[Arm], seeds: range, phase: str) -> list[Job]:
        """A job for each seed of every arm, at its learning rate and length."""
        return [
            make_job(
                self.folder,
                arm,
                seed,
                phase,
                self.rates.get(arm.label),
                self.shares.get(arm.label, 1.0),
            )
            for seed in seeds
            for arm in arms
        ]

    def started(self, jobs: list[Job]) -> list[Job]:
        """Adds jobs to the sweep and has them run."""
        self.jobs += jobs
        self.launch(jobs)
        return jobs

    def tune(self) -> None:
        """Each arm's learning rate by validation loss; one at the grid's edge widens it for all."""
        first = self.first + plan.TUNING_SEED
        lower = upper = 0
        for widening in range(tuning.WIDENINGS + 1):
            self.jobs.clear()
            jobs = self.started(
                [
                    make_job(self.folder, arm, seed, "tune", rate, self.shares.get(arm.label, 1.0))
                    for seed in range(first, first + self.settings.tuning_seeds)
                    for arm in self.arms
                    for rate in tuning.grid(
                        arm.config["optimizer"]["learning_rate"],
                        self.settings.learning_rates,
                        lower,
                        upper,
                    )
                ]
            )
            curves = tuning.sensitivities(jobs)
            tuning.write_tuning(self.folder / "tuning.csv", curves)
            edges = {curve.edge for curve in curves} - {None}
            if not edges or widening == tuning.WIDENINGS:
                break
            lower, upper = lower + ("lowest" in edges), upper + ("highest" in edges)
            self.progress.total += len(edges) * len(self.arms) * self.settings.tuning_seeds
        print(tuning.tuning_table(curves), flush=True)
        self.rates = {curve.arm.label: curve.best for curve in curves if curve.best is not None}

    def pilot(self, parallel: int) -> None:
        """Runs that serve nothing else; says what the plan can find and how long it takes."""
        first = self.first + plan.PILOT_SEED
        seeds = range(first, first + self.settings.pilot)
        jobs = self.started(self.jobs_of(self.arms, seeds, "pilot"))
        print(verdict.announce(jobs, self.arms, self.settings, parallel), flush=True)

    def final(self) -> None:
        """The jobs that are compared; of a range of seeds as many as each arm needs.

        An arm runs until it is told apart from its baseline or has little chance left of being so,
        and a baseline as long as any arm that is compared to it.
        """
        references = plan.references(self.arms, self.settings.baseline)
        if self.settings.fewest == self.settings.most:
            seeds = range(self.first, self.first + self.settings.most)
            self.started(self.jobs_of(self.arms, seeds, "final"))
            return
        looks = Looks(tuple(range(self.settings.fewest, self.settings.most + 1)), len(references))
        running, self.decided, done = dict(references), [], 0
        for look, seeds in enumerate(looks.seeds):
            needed = {*running, *running.values()}
            arms = [arm for arm in self.arms if arm.label in needed]
            self.started(self.jobs_of(arms, range(self.first + done, self.first + seeds), "final"))
            done = seeds
            found = verdict.p_values(self.jobs, self.settings.metric, references, running)
            apart, hopeless = looks.decide(look, found, self.decided)
            self.decided += apart
            running = {a: b for a, b in running.items() if a not in (*apart, *hopeless)}
            if not running:
                return
