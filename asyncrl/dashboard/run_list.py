"""Lists the runs of the page: briefly for the page's frame every two seconds, and with results for the table."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.dashboard.plain import plain
from asyncrl.dashboard.runs import ShownRun
from asyncrl.runs.table import RunTable, is_fine_tuning, started, state_of

LOOK_S = 0.4
"""An answer that has to read many runs ends after this number of seconds. The page asks again for the rest."""
FINE_TUNING, REINFORCEMENT = "sft", "rl"


def all_runs(runs: Mapping[str, ShownRun]) -> list[dict[str, Any]]:
    """The runs with their kinds, states, and times of their newest start, and for each metrics file a text that changes
    when the file does."""
    return [
        {
            "key": shown.key,
            "name": shown.name,
            "kind": FINE_TUNING if is_fine_tuning(shown.run) else REINFORCEMENT,
            "state": state_of(shown.run),
            "started": started(shown.run),
            "files": shown.run.metrics_files(),
        }
        for shown in runs.values()
    ]


class ComparedRuns:
    """The table of the runs, for several threads at once."""

    def __init__(self, runs: Mapping[str, ShownRun]) -> None:
        self._lock = threading.Lock()
        self._runs = runs
        self._table = RunTable({key: shown.run for key, shown in runs.items()})

    def plain(self) -> dict[str, Any]:
        """The runs that are read so far, as plain values; `complete` is true if these are all runs."""
        with self._lock:
            lines, complete = self._table.look(LOOK_S)
        rows = [
            {
                **plain(asdict(line)),
                # `plain` would round the time.
                "changed": line.changed,
                "key": key,
                "name": self._runs[key].name,
                "folder": str(self._runs[key].folder),
                "kind": FINE_TUNING if line.is_fine_tuning else REINFORCEMENT,
            }
            for key, line in lines.items()
        ]
        return {"complete": complete, "rows": rows}
