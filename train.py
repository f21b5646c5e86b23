"""Train a small language model on messages: python train.py [group=option key=value …]

`python train.py --help` shows every group and key.
"""

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

ROOT = Path(__file__).resolve().parent
RESUME = "resume="
SWEEP = {"-m", "--multirun"}
EXTRAS = {"joblib": "parallel", "submitit_local": "slurm", "submitit_slurm": "slurm"}


@hydra.main(config_path=str(ROOT / "configs"), config_name="train", version_base="1.3")
def main(values: DictConfig) -> None:
    from wherelm.config import load_yaml, run_config
    from wherelm.run_folder import CONFIG
    from wherelm.training import loop

    folder = Path(HydraConfig.get().runtime.output_dir)
    composed = OmegaConf.to_container(values, resolve=True)
    del composed["ablation"]
    resume = composed.pop("resume") is not None
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        run_job(composed, folder)
        return
    # Caught here, for Hydra prints a line of its own for what leaves this function.
    try:
        for override in HydraConfig.get().overrides.task:
            if override.startswith("ablation."):
                raise ValueError(f"{override}: acts on sweeps alone; add -m")
        config = run_config(load_yaml(folder / CONFIG) if resume else composed)
        summary = loop.fit(config, folder, ROOT, resume)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if summary["status"] == "interrupted":
        print(f"stopped at step {summary['step']}; go on with: python train.py resume={folder}")
    if summary["exit_code"]:
        sys.exit(summary["exit_code"])


def run_job(values: dict[str, Any], folder: Path) -> None:
    """One job of a sweep. What it raises goes to its summary, so that the other jobs go on."""
    import torch

    from wherelm.ablation import folder as jobs
    from wherelm.config import run_config
    from wherelm.training import loop

    if jobs.stopped(folder.parent):
        return
    threads = torch.get_num_threads()
    try:
        summary = loop.fit(run_config(values), folder, ROOT, jobs.ready(folder))
    except Exception as error:
        known = isinstance(error, ValueError)
        logging.getLogger("wherelm").error("error: %s", error, exc_info=not known)
        jobs.write_failure(folder, error)
        return
    except KeyboardInterrupt:  # in a worker, while it does not train
        jobs.stop(folder.parent, 130)
        return
    finally:
        torch.set_num_threads(threads)  # for the next job in this process
    if summary["exit_code"]:
        jobs.stop(folder.parent, summary["exit_code"])


def resume_arguments(arguments: Sequence[str]) -> list[str]:
    """Hydra's arguments for `resume=RUN`: its folder, and no override that differs from it."""
    from wherelm.command_line import quoted
    from wherelm.config import load_yaml, with_overrides
    from wherelm.run_folder import CONFIG

    runs = [a for a in arguments if a.startswith(RESUME)]
    if len(runs) > 1 or SWEEP & set(arguments):
        raise ValueError(f"{' '.join(runs)}: goes on with one run; leave out the others, and -m")
    run = Path(runs[0].removeprefix(RESUME))
    if not (run / CONFIG).is_file():
        raise ValueError(f"{RESUME}{run}: no run there; give a folder such as runs/NAME/TIME")
    saved = load_yaml(run / CONFIG)
    for pair in (a for a in arguments if not a.startswith(RESUME)):
        if with_overrides(saved, [pair]) != saved:
            raise ValueError(
                f"{pair}: differs from the run's own {run / 'config.yaml'}, which resuming keeps; "
                "leave it out, or start a new run"
            )
    return ["resume=true", f"hydra.run.dir={quoted(run.resolve())}"]


def check_grammar(arguments: Sequence[str]) -> None:
    """ValueError for the first argument that is no override, named (Hydra's message may not)."""
    parser = OverridesParser.create()
    for argument in get_args_parser().parse_args(arguments).overrides:
        try:
            override = parser.parse_override(argument)
            if not override.key_or_group or override.is_delete():
                raise ValueError("no key, or one taken away")
        except (HydraException, ValueError) as error:
            raise ValueError(
                f"{argument}: expected key=value or group=option; write values with commas, "
                f"brackets, spaces or equals signs in quotes: 'key=\"…\"'"
            ) from error


def explain(error: Exception) -> str:
    """Hydra's messages of several lines as one that names the key and what is accepted."""
    from wherelm.config import unknown_key

    cause = error.__cause__ or error
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        parent = cause.parent_node
        accepted = [str(k) for k in parent if k != "hydra"] if OmegaConf.is_dict(parent) else []
        return unknown_key(cause.full_key, accepted)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        accepted = f"expected one of {', '.join(error.options)}"
        if option in EXTRAS:
            accepted = f'install it with pip install -e ".[{EXTRAS[option]}]"'
        return f"{group}={option}: no such option; {accepted}"
    if found := re.match(r"Ambiguous value for argument '([^']*)'", str(error)):
        key, _, value = found[1].lstrip("+").partition("=")
        return (
            f"{key}={value}: several values; for a sweep add -m, for a list write "
            f"'{key}=[{value}]', and for one value that holds commas '{key}=\"{value}\"'"
        )
    return " ".join(line.strip() for line in str(error).splitlines())


def open_mappings(arguments: Sequence[str]) -> list[str]:
    """Splits of any name may be added to data.extra, which Hydra itself allows with ++ alone.

    An empty one takes those of the data's own away: Hydra would merge {} into them.
    """
    emptied = [re.sub(r"^data\.extra=\{\s*\}$", "data.extra=null", a) for a in arguments]
    return [f"++{a}" if re.match(r"data\.extra[.=]", a) else a for a in emptied]


def at_home(argument: str) -> str:
    """The argument with the homes of its paths, which a shell leaves as ~ behind an equals sign."""
    return re.sub(r"(?<=[=\[,:\s])~[\w.-]*(?=/)", lambda at: os.path.expanduser(at[0]), argument)


def command() -> int:
    # With this set Hydra raises what it would otherwise print over several lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # torch's profiler prints lines of its own below this; it is read when torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        sys.argv[1:] = map(at_home, sys.argv[1:])
        if any(argument.startswith(RESUME) for argument in sys.argv[1:]):
            sys.argv[1:] = resume_arguments(sys.argv[1:])
        # Hydra takes -m before the overrides or behind them, but not among them.
        sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in SWEEP)
        check_grammar(sys.argv[1:])
        sys.argv[1:] = open_mappings(sys.argv[1:])
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"error: {what}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before the first step", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(command())
