"""Hydra's side of a run's folder: it is claimed before Hydra makes it and writes a log into it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write

from hydra_plugins.wherelm_sweeper import given


class ClaimRunFolder(Callback):
    """Two runs never write into one folder; `train.command` releases it."""

    def on_run_start(self, config: DictConfig, **more: Any) -> None:
        from wherelm.run_folder import claim

        # The folder's name may hold `${hydra:…}`, which reads this.
        HydraConfig.instance().set_config(config)
        folder = Path(str(config.hydra.run.dir)).resolve()
        resumed = f"resume={os.path.relpath(folder)}" if config.resume else None
        try:
            folder = claim(folder, resumed or given(config, "hydra.run.dir"))
        except (ValueError, OSError) as error:
            # Hydra makes a warning of all that leaves here, but for the end of the process.
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        with read_write(config.hydra):
            config.hydra.run.dir = str(folder)
