"""Checks that a program is a Python with SGLang, before servers are started with it.

This file does not load torch, which may be broken on a host. The program may also be a script that sets variables and
ends with `exec python3 "$@"`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from asyncrl.machine.child import kill_group
from asyncrl.text import reason_of

log = logging.getLogger("asyncrl.train")

PROGRAM_S = 60.0
VERSION_LINE = "asyncrl: sglang "
"""The beginning of the line with the version. Packages may print other lines when they are imported."""
PRINT_VERSION = f"import sglang; print('\\n' + {VERSION_LINE!r} + sglang.__version__)"
PRINT_INSTALLED = f"from importlib.metadata import version; print('\\n' + {VERSION_LINE!r} + version('sglang'))"
FIND_SERVER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
package = find_spec("sglang")
# `find_spec` also finds a mere folder named sglang, such as a checkout in the working folder. So look for the module.
if package is None or not PathFinder.find_spec("sglang.launch_server", package.submodule_search_locations or []):
    sys.exit("it has no package sglang")
"""
"""A program that looks for the server's module. It does not import SGLang, because the import takes 10 s."""


def sglang_version(python: str) -> tuple[str, str]:
    """Return the version of SGLang in a Python, and an empty reason. If SGLang cannot be imported, return an empty
    version and the reason."""
    return _printed_version(python, PRINT_VERSION, {})


def installed_version(python: str, environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the version of SGLang in a Python, such as (0, 5, 23), without an import of SGLang. If the version is not
    found, log the reason, and return ()."""
    version, reason = _printed_version(python, PRINT_INSTALLED, environment)
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        log.warning("engine.python=%s: the version of SGLang is unknown: %s", python, reason or version)
        return ()
    return tuple(int(number) for number in numbers.group().split("."))


def _printed_version(python: str, code: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the version that `code` prints, and an empty reason. If it prints none, return an empty version and the
    reason."""
    try:
        printed, error = _run(python, code, environment, PROGRAM_S)
    except TimeoutError as late:
        return "", str(late)
    found = [line.removeprefix(VERSION_LINE) for line in printed.splitlines() if line.startswith(VERSION_LINE)]
    if error or found:
        return ("", error) if error else (found[0].strip(), "")
    return "", "it did not print the version of SGLang, as a Python would"


def without_sglang(python: str, environment: Mapping[str, str], timeout_s: float = PROGRAM_S) -> str:
    """Return the reason why no server can start with the program `python` in this environment, or an empty text if
    SGLang is installed. If the program does not end within `timeout_s`, log this, and return an empty text too."""
    try:
        return _run(python, FIND_SERVER, environment, timeout_s)[1]
    except TimeoutError as late:
        log.warning("engine.python=%s: %s, so it is unknown whether it has SGLang", python, late)
        return ""


def _run(python: str, code: str, environment: Mapping[str, str], timeout_s: float) -> tuple[str, str]:
    """Run `code` with the program `python`. Return the output and, if the run failed, the reason, else an empty text.
    Raises TimeoutError: the program has not ended within `timeout_s`."""
    if shutil.which(python) is None:
        return "", "there is no such program"
    try:
        process = subprocess.Popen(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        return "", reason_of(error)
    try:
        printed, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"it has not ended within {timeout_s:g} s") from error
    finally:
        kill_group(process)
    lines = [line for line in complaints.splitlines() if line.strip()]
    failure = lines[-1] if lines else f"it ended with status {process.returncode}"
    return printed, failure if process.returncode else ""
