"""The entry point of every role: its command line, its log and its exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import OmegaConf

from asyncrl.config.commands import command_name, show_role_help
from asyncrl.config.compose import composed, read
from asyncrl.config.exits import end_quickly, exit_status
from asyncrl.config.quiet import quiet_imports
from asyncrl.config.schema import TrainConfig
from asyncrl.config.secrets import masked
from asyncrl.errors import ConfigError
from asyncrl.machine.files import LossyText
from asyncrl.masking import masked_text
from asyncrl.text import cut

MESSAGE = "asyncrl: "
"""The start of each line of the message with which a role ends."""
HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "openai", "aiohttp.access", "urllib3")
"""Loggers of HTTP clients, which would add a line for each request of an agent or a tool."""
MCP = ("mcp", "client")
"""Loggers that would add a traceback for each unreadable message of an MCP server. An actor logs such failures
itself."""
HUB = "huggingface_hub"
"""A logger that also writes its warnings itself, so that each warning would appear twice."""
MAX_LOG_CHARS = 16_000


class _Bounded(logging.Formatter):
    """Hides the secrets of a log entry, which may contain text from outside, and limits its length."""

    def format(self, record: logging.LogRecord) -> str:
        return cut(masked_text(super().format(record)), MAX_LOG_CHARS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {command_name()} --help")


def role_main(role: Callable[[TrainConfig], int | None], arguments: Sequence[str], reads_data: bool = True) -> int:
    """Run `role` with the configuration of a command line, and return the exit status of the process (`exit_status`).

    `reads_data` is false for a role that reads no data: its configuration may name missing data files.
    """
    if {"-h", "--help"} & set(arguments):
        return show_role_help(arguments)
    end_quickly()
    sys.stdout, sys.stderr = LossyText(1), LossyText(2)
    log_to_stderr()
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--config-dir", type=Path)

    def run() -> int | None:
        given = parser.parse_intermixed_args(arguments)
        if not given.cfg:
            return role(read(given.words, given.config_dir, reads_data))
        chosen = cast("dict[str, Any]", OmegaConf.to_container(composed(given.words, given.config_dir)))
        sys.stdout.write(OmegaConf.to_yaml(masked(chosen)))
        return None

    return exit_status(run, MESSAGE.removesuffix(": "))


def log_to_stderr() -> None:
    """Log to stderr, with entries of limited length, and without the requests of HTTP clients."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Bounded("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in HTTP_CLIENTS:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in MCP:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    quiet_imports()
    logging.getLogger(HUB).propagate = False
