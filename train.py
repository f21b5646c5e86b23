"""Train a small language model on messages: python train.py [group=option key=value …]

`python train.py --help` shows every group and key.
"""

import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    from wherelm.config import load_yaml, run_config, with_overrides
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
        given = [pair for pair in HydraConfig.get().overrides.task if not pair.startswith(RESUME)]
        for override in given:
            if override.startswith("ablation."):
                raise ValueError(f"{override}: acts on sweeps alone; add -m")
        if resume:
            composed = with_overrides(load_yaml(folder / CONFIG), given)
        summary = loop.fit(run_config(composed), folder, ROOT, resume)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # such as a full disk
        print(f"error: {failed(error, folder)}", file=sys.stderr)
        sys.exit(1)
    run = shown(folder)
    if summary["status"] == "interrupted":
        print(f"stopped at step {summary['step']}; go on with: python train.py resume={run}")
    else:
        print(f'sample it:   python {shown(ROOT / "sample.py")} --run {run} "…"')
        print(f'look at it:  python -m wherelm.visualize {run} "…"')
        print(f"compare it:  python -m wherelm.evaluate {run}")
    if summary["exit_code"]:
        sys.exit(summary["exit_code"])


def shown(path: Path) -> str:
    """A path as one types it from here."""
    return shlex.quote(min(os.path.relpath(path), str(path), key=len))


def failed(error: OSError, folder: Path | str = "") -> str:
    """What could not be read or written, and why; `folder` where the system named no file."""
    what = error.filename or folder
    return f"{what}: {error.strerror or error}" if what else str(error)


def run_job(values: dict[str, Any], folder: Path) -> None:
    """One job of a sweep. What it raises goes to its summary, so that the other jobs go on."""
    import torch

    from wherelm.ablation import folder as jobs
    from wherelm.config import run_config
    from wherelm.run_folder import hold, release
    from wherelm.training import loop

    if jobs.stopped(folder.parent):
        return
    try:
        hold(folder)
    except BlockingIOError as error:  # another command goes on with this job by itself
        print(f"error: {folder}: {error.strerror}", file=sys.stderr)
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
        release(folder)
    if summary["exit_code"]:
        jobs.stop(folder.parent, summary["exit_code"])


def resume_arguments(arguments: Sequence[str]) -> list[str]:
    """Hydra's arguments for `resume=RUN`: its folder, and a new length if that is all that differs.

    Any other override that differs from the run's own is a ValueError; one that does not is left
    out.
    """
    from wherelm.command_line import quoted
    from wherelm.config import LENGTHS, load_yaml, with_overrides
    from wherelm.run_folder import CONFIG

    runs = [a for a in arguments if a.startswith(RESUME)]
    if len(runs) > 1 or SWEEP & set(arguments):
        raise ValueError(f"{' '.join(runs)}: goes on with one run; leave out the others, and -m")
    run = run_of(Path(runs[0].removeprefix(RESUME)))
    saved = load_yaml(run / CONFIG)
    others = [a for a in arguments if not a.startswith(RESUME)]
    lengths = [f"training.{key}=" for key in LENGTHS if saved.get("training", {}).get(key)]
    longer = []
    for pair in others:
        group = pair.partition("=")[0]
        if (ROOT / "configs" / group).is_dir():
            if why := group_difference(group, others, saved):
                raise ValueError(
                    f"{pair}: differs from the run's own {run / CONFIG}, which resuming keeps: "
                    f"{why}; leave it out, or start a new run"
                )
        elif with_overrides(saved, [pair]) != saved:
            if not any(pair.startswith(length) for length in lengths):
                raise ValueError(
                    f"{pair}: differs from the run's own {run / CONFIG}, which resuming keeps; "
                    "leave it out, or start a new run"
                )
            longer.append(pair)
    return ["resume=true", f"hydra.run.dir={quoted(run.resolve())}", *longer]


def run_of(place: Path) -> Path:
    """The run folder that is resumed by this path: a run, or the newest checkpoint of one."""
    from wherelm.run_folder import CHECKPOINTS, CONFIG, STATE, checkpoints

    if (place / STATE).is_file():
        checkpoint, run = place.resolve(), place.parent.parent
        if checkpoint.parent.name != CHECKPOINTS or not (run / CONFIG).is_file():
            raise ValueError(
                f"{RESUME}{place}: a checkpoint outside of its run, without the record to go on "
                "with; give a run folder such as runs/NAME/TIME"
            )
        newest = checkpoints(run)[-1]
        if newest.name != checkpoint.name:
            raise ValueError(
                f"{RESUME}{place}: a run goes on from its newest checkpoint, which is {newest}; "
                f"give {RESUME}{run}"
            )
        return run
    if not (place / CONFIG).is_file():
        raise ValueError(f"{RESUME}{place}: no run there; give a folder such as runs/NAME/TIME")
    return place


def group_difference(group: str, arguments: Sequence[str], saved: dict[str, Any]) -> str | None:
    """How this group, composed as for a new run of these arguments, differs from the saved one."""
    from wherelm.ablation.results import flat
    from wherelm.config import LENGTHS, plain, run_config

    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = hydra.compose("train", open_mappings(arguments))
    groups = saved.keys() if group == "experiment" else [group]
    new = {
        key: OmegaConf.to_container(composed[key], resolve=True)
        for key in groups
        if OmegaConf.is_dict(composed.get(key))
    }
    before, after = (flat(plain(run_config(values))) for values in (saved, saved | new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    lengths = [f"training.{key}" for key in LENGTHS]
    if any(argument.partition("=")[0] in lengths for argument in arguments):
        keys = [key for key in keys if key not in lengths]  # judged by itself
    return f"{keys[0]} is {before.get(keys[0])} there, not {after.get(keys[0])}" if keys else None


def check_options(arguments: Sequence[str]) -> None:
    """ValueError for the first argument that is neither an option nor an override, named.

    Hydra's messages take several lines, and may not name it.
    """
    options = get_args_parser()
    options.allow_abbrev = False
    options.error = refuse_option
    parser = OverridesParser.create()
    for argument in options.parse_args(arguments).overrides:
        try:
            override = parser.parse_override(argument)
            if not override.key_or_group or override.is_delete():
                raise ValueError("no key, or one taken away")
        except (HydraException, ValueError) as error:
            raise ValueError(
                f"{argument}: expected key=value or group=option; write values with commas, "
                f"brackets, spaces or equals signs in quotes: 'key=\"…\"'"
            ) from error


def refuse_option(message: str) -> NoReturn:
    from wherelm.config import places

    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        raise ValueError(f"{message} (--help shows every option)")
    option = unknown.split()[0]
    key = option.lstrip("-").partition("=")[0].replace("-", "_")
    known = [RESUME + "RUN"] if key == "resume" else [f"{place}=…" for place in places(key)]
    how = " or ".join(known) or "key=value or group=option (--help shows them)"
    raise ValueError(f"{option}: no such option; write {how}")


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
    # A log that cannot be written is no error of its own: what the run lacks by it is told once.
    logging.raiseExceptions = False
    # torch's profiler prints lines of its own below this; it is read when torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from wherelm import command_line, run_folder

    if sys.argv[1:] == ["--version"]:
        print(command_line.version())
        return 0
    try:
        sys.argv[1:] = map(at_home, sys.argv[1:])
        # Hydra takes -m before the overrides or behind them, but not among them.
        sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in SWEEP)
        check_options(sys.argv[1:])
        if any(argument.startswith(RESUME) for argument in sys.argv[1:]):
            sys.argv[1:] = resume_arguments(sys.argv[1:])
        sys.argv[1:] = open_mappings(sys.argv[1:])
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {failed(error)}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before the first step", file=sys.stderr)
        return 130
    finally:
        run_folder.release()
    return 0


if __name__ == "__main__":
    sys.exit(command())
