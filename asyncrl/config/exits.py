"""How commands and roles end: their exit statuses, and the message in place of a traceback."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.config.commands import command_name
from asyncrl.errors import AsyncrlError, ConfigError, DataError
from asyncrl.masking import masked_text

EXIT_USAGE = 2
EXIT_FAILURE = 1
EXIT_HOPELESS = 3
"""The status of a learner that ends because too much fails in its run."""
EXIT_STOPPED = 130
"""The status of a process that was asked to stop before it was done."""
EXPECTED: tuple[type[Exception], ...] = (AsyncrlError, OSError)


def end_quickly() -> None:
    """Have this process end without Python's last collections, which look at every object of all modules that were
    loaded. With torch and transformers that took seconds behind the last word of a command."""
    atexit.register(gc.freeze)


def usage_or_failure(error: Exception) -> int:
    """EXIT_USAGE for a configuration or a data file that is refused, else EXIT_FAILURE."""
    return EXIT_USAGE if isinstance(error, (ConfigError, DataError)) else EXIT_FAILURE


@contextmanager
def failures_end_the_command(
    status: int | Callable[[Exception], int] = EXIT_FAILURE, name: str = "", also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Ends the process without a traceback: on Ctrl-C with EXIT_STOPPED; on an AsyncrlError, an OSError or an error of
    `also` with a message on stderr and `status`, which may depend on the error. Each line of the message begins with
    `name`, by default that of the command."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_STOPPED)
    except (*EXPECTED, *also) as error:
        name = name or command_name()
        lines = masked_text(str(error)).splitlines() or [repr(error)]
        sys.stderr.write("".join(f"{name}: {line}\n" for line in lines))
        sys.exit(status(error) if callable(status) else status)
