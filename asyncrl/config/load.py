"""From a command line to a checked configuration: Hydra composes, the schema types it, `checks` refuses what cannot be.

Three levels, as users of verl know them: command line over experiment file over defaults.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

import asyncrl
from asyncrl.config.checks import check
from asyncrl.config.renamed import advice
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import AsyncrlError, ConfigError, DataError, StoppedError
from asyncrl.machine.disk import LossyText
from asyncrl.text import cut

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_STOPPED = 130
"""Of a role that was asked to stop before it was done."""
MAX_LOG_CHARS = 16_000


class _Bounded(logging.Formatter):
    """Keeps what a stranger's text, in a message or a traceback, can add to a log within bounds."""

    def format(self, record: logging.LogRecord) -> str:
        return cut(super().format(record), MAX_LOG_CHARS)


def config_dir() -> Path:
    """The folder of the shipped configuration files: beside the package in a checkout, inside it when installed."""
    package = Path(asyncrl.__file__).parent
    inside, beside = package / "configs", package.parent / "configs"
    return inside if inside.is_dir() else beside


def to_config(composed: DictConfig) -> TrainConfig:
    """The typed, checked configuration. Raises ConfigError."""
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set, on the command line (KEY=VALUE) or by experiment=NAME")
    try:
        config = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        raise ConfigError(str(error)) from error
    assert isinstance(config, TrainConfig)
    check(config)
    return config


def role_main(role: Callable[[TrainConfig], None]) -> None:
    """The entry of a role: reads the command line (`--help`, `--cfg job`, KEY=VALUE ...) and runs `role`.

    A configuration or a data file that is refused ends the process with a message and status 2, what fails later with
    status 1; neither shows a traceback.
    """
    for argument in sys.argv[1:]:
        key = argument.lstrip("+~").partition("=")[0]
        if instead := advice(key):
            sys.stderr.write(f"asyncrl: {key}: {instead}\n")
            sys.exit(EXIT_USAGE)
    ConfigStore.instance().store(name="schema", node=TrainConfig)

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
    def run(composed: DictConfig) -> None:
        # Not before: what Hydra itself prints, such as its help, may be lost to nobody.
        sys.stdout, sys.stderr = LossyText(1), LossyText(2)
        log_to_stderr()
        try:
            role(to_config(composed))
        except StoppedError:
            sys.exit(EXIT_STOPPED)
        except AsyncrlError as error:
            sys.stderr.write(f"asyncrl: {error}\n")
            sys.exit(EXIT_USAGE if isinstance(error, (ConfigError, DataError)) else EXIT_FAILURE)

    run()


def log_to_stderr() -> None:
    """The log of this process: lines of a bounded length on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Bounded("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
