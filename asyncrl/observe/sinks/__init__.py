"""Sinks of metrics, one per file: JSON lines for programs, log lines for people, services for teams."""

from asyncrl.observe.sinks.json_lines import JsonLines, metrics_file, remove_steps
from asyncrl.observe.sinks.opening import open_learner_metrics, open_metrics

__all__ = ["JsonLines", "metrics_file", "open_learner_metrics", "open_metrics", "remove_steps"]
