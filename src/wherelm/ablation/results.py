"""All that the jobs of a sweep were and measured, as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wherelm.ablation.plan import Job


def results(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """A row a job: what it was, every setting in which jobs differ, and all that it measured."""
    settings = [flat(job.config) for job in jobs]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [
        key
        for key in keys
        if key.startswith("position.") or len({str(one.get(key)) for one in settings}) > 1
    ]
    rows = []
    for job, one in zip(jobs, settings, strict=True):
        row = {
            "folder": job.folder.name,
            "phase": job.phase,
            "arm": job.arm.label,
            "scheme": job.arm.scheme,
            "seed": job.seed,
            "status": job.status,
            "error": job.summary.get("error"),
            "learning_rate": job.learning_rate,
        }
        row |= {key: one[key] for key in differing if key in one and key != "seed"}
        rows.append(row | flat({k: v for k, v in job.summary.items() if k not in row}))
    return rows


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, their keys joined by dots; lists as JSON."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return result


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
