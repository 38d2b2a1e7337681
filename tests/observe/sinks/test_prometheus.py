"""Prometheus's own parser reads the endpoint of a role, which its service discovery finds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from asyncrl.errors import ConfigError
from asyncrl.observe.registry import BY_WRITER, EVERY_FILE
from asyncrl.observe.sinks.prometheus import Prometheus, name_of, series_of
from tests.helpers import GENEROUS_S
from tests.observe.sinks.support import source

pytest.importorskip("prometheus_client")

GRAFANA = Path(__file__).parents[3] / "configs" / "grafana.json"


@pytest.mark.slow
def test_an_endpoint_shows_the_newest_numbers_with_their_meanings_until_the_role_ends(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    sink = Prometheus(source(tmp_path, "actor-0"), "127.0.0.1")
    sink.log(3, {"episodes": 7.0, "idle": 0.5, "mood": "fine", 'agent/"x"': 1.0, "\n": 2.0})
    sink.log(4, {"idle": 0.25})
    [found] = json.loads((tmp_path / "prometheus" / "actor-0.json").read_text())
    assert found["labels"] == {"run": tmp_path.name, "role": "actor-0"}
    url = f"http://{found['targets'][0]}/metrics"
    with urlopen(url, timeout=GENEROUS_S) as reply:
        families = {each.name: each for each in text_string_to_metric_families(reply.read().decode())}
    samples = {sample.name: (sample.value, sample.labels) for each in families.values() for sample in each.samples}
    assert samples["asyncrl_actor_idle"] == (0.25, {})
    assert samples["asyncrl_actor_episodes_total"] == (7.0, {})
    assert samples["asyncrl_actor_step"] == (4.0, {})
    assert samples["asyncrl_actor_agent_by_name"] == (1.0, {"name": '"x"'})
    assert samples["asyncrl_actor_other"] == (2.0, {"name": "\n"})
    assert families["asyncrl_actor_episodes"].type == "counter"
    assert "(share)" in families["asyncrl_actor_idle"].documentation
    assert not any("mood" in name for name in samples)
    sink.close()
    assert not list((tmp_path / "prometheus").iterdir())
    with pytest.raises(URLError):
        urlopen(url, timeout=GENEROUS_S)


@pytest.mark.slow
def test_a_name_that_is_no_valid_unicode_does_not_fail_the_scrape(tmp_path: Path) -> None:
    sink = Prometheus(source(tmp_path, "actor-0"), "127.0.0.1")
    sink.log(1, {"\ud800": 1.0, "idle": 0.5})
    [found] = json.loads((tmp_path / "prometheus" / "actor-0.json").read_text())
    with urlopen(f"http://{found['targets'][0]}/metrics", timeout=GENEROUS_S) as reply:
        text = reply.read().decode()
    assert "asyncrl_actor_idle 0.5" in text
    assert 'name="' + r"\\ud800" + '"' in text
    sink.close()


def test_one_of_a_family_has_a_label_and_an_unknown_metric_its_name() -> None:
    assert series_of("learner", "lag/3").labels == {"lag": "3"}
    assert series_of("learner", "lag/3").name == "asyncrl_learner_lag_by_lag"
    assert series_of("learner", "lag/mean").name == "asyncrl_learner_lag_mean"
    assert series_of("scoring-1-shard-0", "mine").labels == {"name": "mine"}


@pytest.mark.parametrize("writer", BY_WRITER)
def test_no_two_metrics_of_a_role_have_one_name(writer: str) -> None:
    metrics = [metric for metric in (*BY_WRITER[writer], *EVERY_FILE) if metric.kind != "text"]
    names = [name_of(writer, metric) + "_total" * (metric.kind == "counter") for metric in metrics]
    assert sorted(set(names)) == sorted(names)


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observe.prometheus_host=192.0.2.1"):
        Prometheus(source(tmp_path), "192.0.2.1")


def test_the_dashboard_for_grafana_asks_only_for_metrics_that_exist() -> None:
    known: set[str] = set()
    for writer, metrics in BY_WRITER.items():
        for metric in (*metrics, *EVERY_FILE):
            known.add(name_of(writer, metric) + "_total" * (metric.kind == "counter"))
    page = json.loads(GRAFANA.read_text())
    expressions = [target["expr"] for panel in page["panels"] for target in panel.get("targets", [])]
    assert len(expressions) >= 20
    for expression in expressions:
        names = set(re.findall(r"\basyncrl_\w+", expression))
        assert names, expression
        assert names <= known, expression
        assert '{run=~"$run"' in expression, expression
    boxes = [panel["gridPos"] for panel in page["panels"]]
    cells = [
        (x, y)
        for box in boxes
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie over each other"
