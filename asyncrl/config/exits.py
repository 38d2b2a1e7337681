"""The exit statuses of commands and roles, and the function that turns an error into a message and a status."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import select
import sys
from collections.abc import Callable

from asyncrl.config.commands import command_name
from asyncrl.errors import (
    AsyncrlError,
    ConfigError,
    DataError,
    RunOverError,
    StoppedError,
    TooManyFailuresError,
)
from asyncrl.masking import masked_text

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_HOPELESS = 3
"""The status of a learner that ends because too many episodes or scorings of its run fail."""
EXIT_STOPPED = 130
"""The status of a process that was stopped before it was done."""
MAX_LINE_CHARS = 2_000
STANDARD_OUTPUT = 1
"""The file descriptor of standard output."""


def end_quickly() -> None:
    """Skip Python's last garbage collections when this process ends."""
    # These collections visit every object of all loaded modules, which takes seconds with torch and transformers.
    atexit.register(gc.freeze)


def usage_or_failure(error: Exception) -> int:
    """Return EXIT_USAGE for a refused configuration or data file, else EXIT_FAILURE."""
    return EXIT_USAGE if isinstance(error, (ConfigError, DataError)) else EXIT_FAILURE


def exit_status(run: Callable[[], int | None], name: str) -> int:
    """Run a command and return its exit status. Expected errors print no traceback.

    Ctrl-C and StoppedError give EXIT_STOPPED without a message. RunOverError gives 0. The status is also 0 if the
    reader of the output has closed it, as `| head` does. For any other AsyncrlError and for an OSError the message goes
    to stderr, and each of its lines begins with `name`. TooManyFailuresError then gives EXIT_HOPELESS, and
    `usage_or_failure` returns the status for every other error.
    """
    try:
        status = run() or 0
        sys.stdout.flush()
        return status
    except (KeyboardInterrupt, StoppedError):
        return EXIT_STOPPED
    except RunOverError as error:
        logging.getLogger(command_name()).info("%s", error)
        return 0
    except (AsyncrlError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_enough():
            return 0
        from asyncrl.text import cut  # Imported late: it loads a library, and `--help` must be fast.

        lines = masked_text(str(error)).splitlines() or [repr(error)]
        sys.stderr.write("".join(f"{name}: {cut(line, MAX_LINE_CHARS)}\n" for line in lines))
        return EXIT_HOPELESS if isinstance(error, TooManyFailuresError) else usage_or_failure(error)


def _reader_has_enough() -> bool:
    """True if the reader has closed standard output. Then later writes to standard output are also discarded, so that
    they raise no error."""
    output = select.poll()
    output.register(STANDARD_OUTPUT, 0)
    if not output.poll(0):
        return False
    # Python flushes the output once more when it ends, and must find no closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)
    return True
