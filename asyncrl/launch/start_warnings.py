"""Records the warnings of a start in the run's folder, so that the run's summary can show them at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncrl.config.locations import START_WARNINGS_FILE
from asyncrl.machine.files import write_whole
from asyncrl.masking import masked_text
from asyncrl.text import cut, json_text

log = logging.getLogger("asyncrl.train")

LOGGER = "asyncrl"
"""The logger above all loggers of asyncrl. Warnings of other libraries are not recorded."""
OF_PROCESSES = "asyncrl.launch."
"""The names of the loggers for processes and hosts begin with this. Their warnings are not recorded, because they are
true only for a moment, such as that a process has not ended yet."""
LONGEST, MOST = 2000, 100
"""The maximum length of a recorded warning in characters, and the maximum number of recorded warnings."""


class StartWarnings(logging.Handler):
    """Collects the warnings that are logged in a `with` block, each text once, until `record` is called."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._found) < MOST and not record.name.startswith(OF_PROCESSES):
            self._found[cut(masked_text(record.getMessage()), LONGEST)] = None

    def record(self, run_dir: Path) -> None:
        """Write the warnings into the run's folder in place of those of earlier starts, and collect no more. If the
        file cannot be written, this only logs a warning."""
        logging.getLogger(LOGGER).removeHandler(self)
        try:
            write_whole(run_dir / START_WARNINGS_FILE, f"{json_text({'warnings': list(self._found)})}\n")
        except OSError as error:
            log.warning("%s was not written: %s", run_dir / START_WARNINGS_FILE, error)

    def __enter__(self) -> Self:
        logging.getLogger(LOGGER).addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger(LOGGER).removeHandler(self)
