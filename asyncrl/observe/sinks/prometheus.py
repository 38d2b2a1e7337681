"""Serves metrics to Prometheus: an endpoint for each role, with the newest values of its metrics.

The role listens on a free port, and writes the address into runs/NAME/prometheus/ROLE.json, in the format of
Prometheus's service discovery by files: `files: [runs/NAME/prometheus/*.json]` finds all roles of a run.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.machine.files import write_whole
from asyncrl.observe.metrics import Sink, Value
from asyncrl.observe.registry import Kind, Metric, describe
from asyncrl.observe.sinks.scraping import serve_metrics
from asyncrl.observe.sinks.source import Source, need

logger = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0", "::")
VARIABLE = re.compile(r"[A-Z]+")
"""A placeholder for any text in the name of a family of metrics, such as LAG in `lag/LAG`."""
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]+")


class Prometheus(Sink):
    """Serves the numbers, under the names that `series_of` gives. Texts are left out.

    Raises ConfigError: the package is not installed, or `host` is not an address of this machine.
    """

    def __init__(self, source: Source, host: str) -> None:
        need("prometheus_client", "prometheus")
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._source = source
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = serve_metrics(host, make_wsgi_app(registry))
        except OSError as error:
            raise ConfigError(f"observe.prometheus_host={host}: cannot listen there: {error}") from error
        name = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        target = {
            "targets": [f"{name}:{self._server.server_port}"],
            "labels": {"run": source.run, "role": source.role},
        }
        self._file = source.run_dir / "prometheus" / f"{source.role}.json"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps([target]))
        except OSError as error:
            logger.warning("Prometheus cannot find %s, since %s cannot be written: %s", target, self._file, error)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        with self._lock:
            self._values |= {**numbers, "step": float(step)}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. prometheus_client calls this at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values = dict(self._values)
        families: dict[str, Any] = {}
        for name, value in values.items():
            series = series_of(self._source.role, name)
            if series.name not in families:
                made = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
                families[series.name] = made(series.name, series.help, labels=list(series.labels))
            # A single name that is not valid Unicode would make every scrape fail.
            labels = [text.encode(errors="backslashreplace").decode() for text in series.labels.values()]
            families[series.name].add_metric(labels, value)
        yield from families.values()


@dataclass(frozen=True, slots=True)
class PrometheusSeries:
    """A metric for Prometheus. `name` lacks the ending `_total`, which Prometheus adds to the names of counters."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, str]


def series_of(role: str, name: str) -> PrometheusSeries:
    """The series of a metric. `reward/mean` of the learner is `asyncrl_learner_reward_mean`, and `lag/3` of the family
    `lag/LAG` is `asyncrl_learner_lag_by_lag{lag="3"}`. An unknown metric, such as one of an agent, is
    `asyncrl_learner_other{name="..."}`."""
    writer = role.partition("-")[0]
    metric = describe(role, name)
    if metric is None:
        return PrometheusSeries(
            f"asyncrl_{writer}_other", "gauge", "metrics that asyncrl does not know", {"name": name}
        )
    pattern = VARIABLE.sub(lambda found: f"(?P<{found[0].lower()}>.+)", re.escape(metric.name))
    found = re.fullmatch(pattern, name)
    return PrometheusSeries(
        name_of(writer, metric),
        metric.kind,
        f"{metric.meaning} ({metric.unit})" if metric.unit else metric.meaning,
        found.groupdict() if found else {},
    )


def name_of(writer: str, metric: Metric) -> str:
    """The name of a metric or a family, without the `_total` of counters."""
    words = VARIABLE.sub(lambda found: f"_by_{found[0].lower()}_", metric.name)
    return f"asyncrl_{writer}_{NOT_IN_NAMES.sub('_', words).strip('_')}"
