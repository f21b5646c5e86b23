"""Hydra's side of a sweep: composes its arms, has its jobs launched, and reports.

Hydra takes a sweeper from its own plugin namespace alone. What a sweep is lives in
`wherelm.ablation`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from wherelm.command_line import quoted

if TYPE_CHECKING:
    from wherelm.ablation.course import Course
    from wherelm.ablation.plan import AblationConfig, Arm, Job
    from wherelm.config import RunConfig

# What a job says goes to its train.log alone; the terminal shows how the sweep gets on.
QUIET = (
    "+hydra.job_logging.loggers.wherelm.handlers=[file]",
    "+hydra.job_logging.loggers.wherelm.propagate=false",
)
WORKERS = ("JoblibLauncher", "LocalLauncher")  # their jobs run in processes that this one started


class Stopped(BaseException):  # no Exception, which a job would take for its own failure
    """The sweep was told to stop: `code` is 130 after Ctrl-C, 143 after SIGTERM."""

    def __init__(self, code: int):
        self.code = code


class AblationSweeper(BasicSweeper):
    """Arms (the product of all values on the command line and in `params`) × seeds."""

    def sweep(self, arguments: list[str]) -> None:
        """Runs what is missing in hydra.sweep.dir, writes its results and prints the comparison.

        Ends the process: with 1 where jobs failed or did not end, 130 or 143 where it was stopped.
        """
        from wherelm.ablation import folder as state
        from wherelm.ablation import plan
        from wherelm.ablation.course import Course
        from wherelm.ablation.progress import Progress
        from wherelm.config import typed
        from wherelm.run_folder import claim

        values = OmegaConf.to_container(self.config.ablation)
        settings = typed(plan.AblationConfig, values, "ablation")
        # The folder's name may hold `${hydra:…}`, which reads this.
        HydraConfig.instance().set_config(self.config)
        place = Path(str(self.config.hydra.sweep.dir)).resolve()
        arms = self.arms(arguments, settings)
        for line in settings.warnings():
            print(f"warning: {line}", file=sys.stderr)
        self.folder = claim(place, given(self.config, "hydra.sweep.dir"))
        state.go(self.folder)
        tuned = settings.tune * settings.learning_rates * settings.tuning_seeds
        progress = Progress(len(arms) * (settings.pilot + tuned + settings.most))
        self.progress = progress
        course, code = Course(self.folder, arms, settings, self.launch, progress), 0
        try:
            if settings.equal == "time":
                course.shares = self.shares(arms)
            course.run(self.parallel(len(arms) * settings.most))
        except Stopped as stopped:
            code = stopped.code
        sys.exit(self.report(course, code))

    def shares(self, arms: Sequence[Arm]) -> dict[str, float]:
        """The share of the configured length that each arm trains, so that all take one time.

        By the cost of a step, measured once side by side and kept with the sweep.
        """
        from wherelm.config import project_root, run_config
        from wherelm.run_folder import write_json
        from wherelm.training.cost import step_seconds

        path = self.folder / "cost.json"
        seconds = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if {arm.label for arm in arms} - seconds.keys():
            configs = [run_config(arm.config) for arm in arms]
            threads = configs[0].training.threads or self.threads(len(arms))
            measured = step_seconds(configs, project_root(), threads)
            seconds = {arm.label: value for arm, value in zip(arms, measured, strict=True)}
            write_json(path, seconds)
        least = min(seconds[arm.label] for arm in arms)
        shares = {arm.label: round(least / seconds[arm.label], 3) for arm in arms}
        shown = ", ".join(f"{a} {1000 * seconds[a]:.1f} ms ({s:.0%})" for a, s in shares.items())
        print(f"equal time; a step, and the share of all steps: {shown}", flush=True)
        return shares

    def arms(self, arguments: Sequence[str], settings: AblationConfig) -> list[Arm]:
        """What is compared, each composed and checked; ValueError before anything is trained."""
        from wherelm.ablation.plan import Arm, references, short_hash
        from wherelm.ablation.seal import expect_arms
        from wherelm.config import plain

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        parsed = parser.parse_overrides([*self._parse_config(), *arguments])
        (products,) = self.split_arguments(parsed, None)
        values: dict[str, set[str]] = {}
        for key, _, value in (pair.partition("=") for pairs in products for pair in pairs):
            values.setdefault(key, set()).add(value)
        varied = [key for key in values if len(values[key]) > 1]
        if "seed" in varied:
            raise ValueError("seed=…: a sweep draws its own; give ablation.seeds=N, and seed=FIRST")
        arms = []
        for pairs in products:
            pairs = [*pairs, *settings.overrides]
            config = self.composed(pairs)
            if not settings.overrides and settings.split not in config.final_splits:
                raise ValueError(
                    f"ablation.metric={settings.metric}: expected one of the splits that are "
                    f"measured at the end: {', '.join(config.final_splits)}"
                )
            shown = [key for key in varied if key != "position"]
            own = [pair for pair in pairs if pair.partition("=")[0] in shown]
            # A file's name, for several files may set up one scheme.
            options = dict(pair.split("=", 1) for pair in pairs)
            label = " ".join([options.get("position", config.position.name), *own])
            factors = sorted(varied, key=lambda key: key != "position")
            levels = tuple((key, options[key]) for key in factors)
            arms.append(Arm(label, tuple(pairs), plain(config), levels))
        references(arms, settings.baseline)
        if settings.rule is not None:
            expect_arms(settings.rule, [arm.label for arm in arms])
        runs: dict[str, str] = {}
        for arm in arms:
            run = short_hash(arm.config)
            if run in runs:
                raise ValueError(
                    f"{arm.label}: the same run as {runs[run]}, for names, tracking, threads and "
                    "the cache change no result; leave one of them out"
                )
            runs[run] = arm.label
        return arms

    def composed(self, overrides: Sequence[str]) -> RunConfig:
        """The typed configuration that a job with these overrides would have."""
        from wherelm.config import run_config

        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        former = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            keys = [key for key in config if key not in ("hydra", "ablation", "resume")]
            return run_config(
                OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
            )
        finally:
            HydraConfig.instance().cfg = former

    def launch(self, jobs: Sequence[Job]) -> None:
        """Runs those that are not complete, through Hydra's launcher; Stopped where it was told to.

        A launcher that loses a worker ends early: its jobs are then found killed or missing.
        """
        from wherelm.ablation import folder as state

        missing = [job for job in jobs if job.status != "complete"]
        if not missing:
            return
        parallel = self.parallel(len(missing))
        more = [f"hydra.sweep.dir={quoted(self.folder)}", *QUIET]
        if parallel > 1 and missing[0].config["training"]["threads"] is None:
            more.append(f"training.threads={self.threads(len(missing))}")
        if missing[0].config["data"]["cache"] is None:
            more.append(f"data.cache={quoted(self.folder / state.CACHE)}")
        with self.progress.watching(jobs), self.stopping():
            if self.kind != "BasicLauncher":
                self.tokenize(missing)
            batch = self.max_batch_size or (
                parallel if self.kind == "LocalLauncher" else len(missing)
            )
            while missing and not state.stopped(self.folder):
                for start in range(0, len(missing), batch):
                    self.start(missing[start : start + batch], start, more)
                # Jobs that never began, since a worker was lost: again, as long as some begin.
                former, missing = missing, [job for job in missing if job.status == "missing"]
                if len(missing) == len(former) or self.kind not in WORKERS:
                    break
        if code := state.stopped(self.folder):
            raise Stopped(code)

    def start(self, jobs: Sequence[Job], number: int, more: Sequence[str]) -> None:
        """Has Hydra's launcher run these jobs with `more` overrides, and waits for all of them."""
        overrides = [
            [*job.overrides, f"hydra.sweep.subdir={job.folder.name}", *more] for job in jobs
        ]
        try:
            self.launcher.launch(overrides, initial_job_idx=number)
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            print(f"error: {self.kind} ended early: {first}", file=sys.stderr)
            if self.kind == "LocalLauncher":  # it leaves the jobs beside the lost one running
                with contextlib.suppress(ChildProcessError):
                    while True:
                        os.wait()

    @property
    def kind(self) -> str:
        return type(self.launcher).__name__

    def parallel(self, jobs: int) -> int:
        """How many jobs share this machine at a time."""
        from wherelm.ablation.folder import cores

        if self.kind == "JoblibLauncher":
            asked = self.config.hydra.launcher.n_jobs
            return min(jobs, asked if asked > 0 else max(1, cores() + 1 + asked))
        if self.kind == "LocalLauncher":
            return min(jobs, self.max_batch_size or cores())
        return 1

    def threads(self, jobs: int) -> int:
        """The threads of each of so many jobs."""
        from wherelm.ablation.folder import cores

        return max(1, cores() // self.parallel(jobs))

    def tokenize(self, jobs: Sequence[Job]) -> None:
        """Fills the cache once, so that jobs that begin together need not all do it."""
        from wherelm import pipeline
        from wherelm.ablation import folder as state
        from wherelm.config import project_root, run_config

        seen = set()
        for job in jobs:
            data = job.config["data"] | {
                "cache": job.config["data"]["cache"] or str(self.folder / state.CACHE)
            }
            config = run_config(job.config | {"data": data})
            key = json.dumps(
                [job.config[k] for k in ("data", "tokenizer")] + [config.model.context]
            )
            if key not in seen:
                splits = ("train", "validation", *config.final_splits)
                with contextlib.suppress(ValueError):  # which the job will meet and report itself
                    pipeline.prepare(config, project_root(), splits)
            seen.add(key)

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM let the running jobs save and no other begin.

        A job that runs in this process sees to them itself while it trains; workers get Ctrl-C from
        the terminal and SIGTERM from here. Queued jobs elsewhere go on, and new ones do not begin.
        """
        from wherelm.ablation import folder as state

        def note(number: int, frame: object) -> None:
            state.stop(self.folder, 128 + number)
            if self.kind not in WORKERS:
                raise Stopped(128 + number)
            for each, handler in former.items():
                signal.signal(each, handler)
            if number == signal.SIGTERM:
                for child in children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        former = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def report(self, course: Course, code: int) -> int:
        """Writes results.csv and comparison.json, prints them; the exit status of the sweep."""
        from wherelm.ablation import folder as state
        from wherelm.ablation import results, verdict
        from wherelm.run_folder import figure_of, figures_beside

        jobs, settings = course.jobs, course.settings
        results.write_csv(self.folder / "results.csv", results.results(jobs))
        final = [job for job in jobs if job.phase == "final"]
        if any(job.status == "complete" for job in final):
            answer = verdict.answer(self.folder, final, course.arms, settings, course.decided)
            print(f"\n{answer}\n")
        print(f"results: {self.folder / 'results.csv'}", flush=True)
        undone = [job for job in jobs if job.status != "complete"]
        for job in undone:
            why = job.summary.get("error", "")
            print(f"{job.status}: {job.folder.name} {why}".rstrip(), file=sys.stderr)
        if undone or code:
            again = "the same command with hydra.sweep.dir"
            print(f"do what is missing with {again}={self.folder}", file=sys.stderr)
            return code or 1
        shutil.rmtree(self.folder / state.CACHE, ignore_errors=True)
        if all(figure_of(job.summary, settings.metric) is None for job in final):
            found = figures_beside(final[0].summary, settings.metric)
            why = found.get("reason") or f"{settings.split} was measured by {', '.join(found)}"
            print(
                f"error: ablation.metric={settings.metric}: no run has it; {why}", file=sys.stderr
            )
            return 1
        return 0


def given(config: DictConfig, key: str) -> str | None:
    """What the command line gave this key of Hydra's, as it was typed; None where it did not."""
    typed = [pair for pair in config.hydra.overrides.hydra if pair.startswith(f"{key}=")]
    return typed[-1] if typed else None


def children() -> list[int]:
    """The processes that this one started, where Linux tells."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(child) for place in lists for child in place.read_text().split()]
