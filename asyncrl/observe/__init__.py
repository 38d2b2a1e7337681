"""The reports of a process: metrics, spans and kept episodes. This package writes them; `asyncrl.runs` reads them.

A report never delays or ends the work that it reports. This package keeps promise 7 (back-pressure everywhere, silent
drops nowhere) for reports: each queue is bounded (`sinks/background.py`, `spans.py`, `kept/recording.py`), and what
does not fit is counted. Services get the configuration, in which `from_config.py` masks the secrets (promise 8).

In reading order:

- `from_config.py`, `reports.py`: open the reports of one process.
- `metrics.py`, `sinks/`: the interface of sinks, and one file per sink. `sinks/json_lines.py` writes a file per role.
- `registry/`: every metric with its kind, unit and meaning, one file per writer. docs/metrics.md is made from it.
- `spans.py`: the timeline, for `asyncrl trace`. `usage.py`: the use of the machine.
- `kept/`: the sample of episodes of each step. `format.py` and `index.py` are its two file formats. `shown_text.py`:
  the text of an episode for people.

A sink or a metric may be added without asking. A format of files on disk changes only together with its reader in
`asyncrl.runs`, and with a new format number.
"""
