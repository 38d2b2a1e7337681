"""The reports of a process: metrics, spans, kept episodes. It emits them and reads no run; `asyncrl.runs` does.

A report never holds up or ends the work that it reports. Promise 7 (back-pressure everywhere, silent drops nowhere) is
kept here for reports: each queue is bounded (`sinks/background.py`, `spans.py`, `kept/recording.py`), and what does not
fit is counted in a metric or a note. Values for services have their secrets masked (`from_config.py`, promise 8).

In reading order:

- `from_config.py`, `reports.py`: the door, and the reports of one process.
- `metrics.py`, `sinks/`: the interface of sinks, and one sink a file. Each role has a file of `sinks/json_lines.py`.
- `registry/`: every metric with its kind, unit and meaning, one file a writer. docs/metrics.md is made from it.
- `spans.py`: the timeline, for `asyncrl trace`. `usage.py`: the use of the machine.
- `kept/`: the sample of episodes of each step. `format.py` and `index.py` are its two file formats.

A sink or a metric may be added without asking anyone. A format of files on disk changes only together with its reader
in `asyncrl.runs`, and with a new format number.
"""
