"""How a sweep gets on, read off the files that its jobs write."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from wherelm.ablation.plan import Job
from wherelm.run_folder import SUMMARY

LOOK_EVERY = 0.5  # seconds


class Progress:
    """A line on the terminal for every job that ends, wherever it ran, with the time still left.

    It looks at the files that jobs write, so that it is the same with every launcher.
    """

    def __init__(self, total: int):
        self.total = total
        self.done: set[Path] = set()
        self.ended = 0
        self.started = time.monotonic()

    @contextlib.contextmanager
    def watching(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Prints those of the jobs that end while the block runs."""
        self.done |= {job.folder for job in jobs if job.status == "complete"}
        before = {job.folder: written(job.folder) for job in jobs}
        waiting = [job for job in jobs if job.folder not in self.done]
        end = threading.Event()

        def look() -> None:
            for job in [j for j in waiting if written(j.folder) != before[j.folder] and j.summary]:
                waiting.remove(job)
                self.tell(job)

        def keep_looking() -> None:
            while not end.wait(LOOK_EVERY):
                look()

        self.width = max(22, *(len(job.arm.label) for job in jobs))
        arm = f"{'arm':{self.width}}"
        tqdm.write(f"{'job':>9}  {arm}{'seed':>7}{'lr':>10}{'loss':>9}{'time':>8}{'left':>9}")
        self.bar = tqdm(
            total=self.total,
            initial=len(self.done),
            desc="sweep",
            disable=not sys.stderr.isatty(),
            leave=False,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar:20}| [{elapsed}]",
            dynamic_ncols=True,
        )
        thread = threading.Thread(target=keep_looking, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            look()
            self.bar.close()

    def tell(self, job: Job) -> None:
        self.done.add(job.folder)
        self.ended += 1
        number = len(self.done)
        each = (time.monotonic() - self.started) / self.ended
        left = each * (self.total - number)
        tqdm.write(progress_line(number, self.total, job, left, self.width))
        self.bar.update()


def written(folder: Path) -> int:
    """When the summary was last written, in ns; 0 without one."""
    try:
        return (folder / SUMMARY).stat().st_mtime_ns
    except OSError:
        return 0


def progress_line(number: int, total: int, job: Job, seconds_left: float, width: int) -> str:
    """One job that ended: its number, arm, seed, result, and the time that all others need."""
    summary = job.summary
    loss, seconds, left = "-", "-", f"{clock(seconds_left):>9}"
    if job.status == "complete":
        loss = summary["splits"].get("validation", {}).get("loss", summary["validation_loss"])
        loss, seconds = f"{loss:.4f}", clock(summary["seconds"])
    else:
        left += f"  {job.status} {summary.get('error', '')}".rstrip()
    return (
        f"{number:>4}/{total:<4}  {job.arm.label:{width}}{job.seed:>7}{job.learning_rate:>10g}"
        f"{loss:>9}{seconds:>8}{left}"
    )


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
