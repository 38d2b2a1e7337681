"""`asyncrl trace` writes a timeline, and says in words where time went."""

from __future__ import annotations

import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from asyncrl.observe.spans import spans_file
from tests.helpers import status_of
from tests.runs.trace.support import BEGIN, line, process, write, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path, ahead=-30.0)
    return tmp_path


def names_in(path: Path) -> set[str]:
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if event["ph"] in "Xi"}


def test_a_window_has_only_what_reaches_into_it(run_dir: Path) -> None:
    assert status_of("trace", run_dir) == 0
    assert {"episode", "ticket", "step", "plan"} <= names_in(run_dir / "trace.json.gz")
    out = run_dir / "part.json.gz"
    assert status_of("trace", run_dir, "--seconds", "0:0.4", "--out", out) == 0
    assert names_in(out) == {"ticket", "episode", "queued"}
    assert status_of("trace", run_dir, "--steps", "7", "--out", out) == 0
    assert "deliver" in names_in(out)
    assert "queued" not in names_in(out)


def test_the_wait_of_a_step_is_explained(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("trace", run_dir, "--explain-step", "7") == 0
    text = capsys.readouterr().out
    assert "Step 7 took 60.0 s: wait 50.0 s, fetch 1.0 s, train 8.9 s." in text
    assert "idle for 51.0 s of it (85%)" in text
    assert "the replay lacked episodes for 45.0 s and labels for 5.0 s" in text
    assert "2 groups with 2 episodes" in text
    assert "t2 waited 0.000 s for the plan. Its last episode was t2.0.0, 65.0 s from its ticket to its label:" in text
    assert " 46%  30.0 s in tool search, 2 times" in text
    assert " 45%  29.0 s generating, 2 times, 15 tokens" in text
    assert "  5%  3.0 s waiting for a scorer" in text


def test_a_wait_for_several_shards_is_the_longest_of_them_since_the_learner_asks_all_at_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = [line("no episodes", "learner waits", 25.0, 50.0), line("no labels", "learner waits", 50.0, 65.0)]
    write(run_dir, "replay-1", [process("replay-1", endpoint="tcp://other"), *waits])
    assert status_of("trace", run_dir, "--explain-step", "7") == 0
    assert "the replay lacked episodes for 45.0 s and labels for 15.0 s" in capsys.readouterr().out


def test_of_a_step_that_was_repeated_only_the_newest_attempt_is_explained(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = [
        line("evaluate", "steps", 190.0, 199.0, step=7),
        line("wait", "steps", 200.0, 202.0, step=7),
        line("fetch", "steps", 202.0, 203.0, step=7),
        line("train", "steps", 203.0, 213.0, step=7),
    ]
    end = line("step", "steps", 200.0, 213.0, step=7, version=3)
    # The replay lacked labels for the last second of the second wait.
    with spans_file(run_dir, "replay").open("a") as file:
        file.write(f"{json.dumps(line('no labels', 'learner waits', 201.0, 202.0))}\n")
    learner = spans_file(run_dir, "learner")
    evaluation = json.dumps(line("evaluate", "steps", 0.0, 20.0, step=7))
    first = learner.read_text().replace('["wait"', f'{evaluation}\n["wait"')
    stopped = line("evaluate", "steps", 300.0, 340.0, step=7)
    for later in ([], [end], [end, process("learner"), stopped]):
        more = [process("learner"), *again, *later]
        learner.write_text(first + "".join(f"{json.dumps(each)}\n" for each in more))
        assert status_of("trace", run_dir, "--explain-step", "7") == 0
        text = capsys.readouterr().out
        assert "Step 7 took 13.0 s: wait 2.0 s, fetch 1.0 s, train 10.0 s." in text
        assert "Before it, the learner waited 9.0 s for an evaluation." in text
        assert "the replay lacked labels for 1.0 s.\n" in text


def test_the_time_of_an_episode_is_explained(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("trace", run_dir, "--explain-episode", "t1.0.0") == 0
    text = capsys.readouterr().out
    assert "t1.0.0 of task task-1 on actor-0 took 12.0 s from its ticket until its label:" in text
    assert "42%  5.0 s in tool search, 2 times" in text
    assert "      +0.5  generate: 2.0 s (tokens 10, version 3)" in text
    assert "and waited 58.0 s for the plan of step 7." in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--explain-step", "9"], "no spans of step 9"),
        (["--explain-episode", "t9.0.0"], "no spans of an episode t9.0.0"),
        (["--steps", "8:9"], "no spans of steps 8 to 9"),
        (["--seconds", "500:600"], "no spans in this window"),
        (["--format", "otlp"], "needs --endpoint"),
    ],
)
def test_what_is_not_there_is_said(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert status_of("trace", run_dir, *arguments) in (1, 2)
    assert reason in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("trace", tmp_path) == 2
    assert f"{tmp_path} is not a run with spans" in capsys.readouterr().err


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a collector of traces, and the bodies that it gets."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()


@pytest.mark.slow
def test_a_collector_gets_each_episode_and_each_step_as_a_trace(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra asyncrl[otel] is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (url, bodies):
        assert status_of("trace", run_dir, "--format", "otlp", "--endpoint", url) == 0
    assert f"31 spans were sent to {url}" in capsys.readouterr().out
    spans, services = [], set()
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            services |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert services == {"asyncrl.actor", "asyncrl.replay", "asyncrl.learner"}
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    assert len({span.span_id for span in spans}) == 31
    root = next(span for span in spans if span.name == "episode" and span.start_time_unix_nano == (BEGIN + 10) * 10**9)
    assert not root.parent_span_id
    others = [span for span in traces[root.trace_id] if span is not root]
    assert {span.name for span in others} == {*("queued", "generate", "tools", "tool search", "deliver")} | {
        *("ticket", "label queue", "label"),
    }
    assert {span.parent_span_id for span in others} == {root.span_id}
    step = next(span for span in spans if span.name == "step")
    ready = next(span for span in spans if span.name == "ready")
    assert ready.links[0].trace_id == step.trace_id
    assert ready.links[0].span_id == step.span_id


@pytest.mark.parametrize("role", ["learner", "replay", "actor-0"])
@pytest.mark.parametrize("given", [[], ["--steps", "1:5"], ["--explain-step", "3"], ["--explain-episode", "g.0.0"]])
def test_values_of_another_kind_than_expected_are_left_out(tmp_path: Path, role: str, given: list[str]) -> None:
    path = tmp_path / "spans" / f"{role}.jsonl"
    path.parent.mkdir()
    lines = [
        *(["wait", "steps", 1, 9, {"step": step}] for step in (3, "x", [1], None)),
        *(["ready", "groups", 1, 5, {"step": 3, "group": 7, "episodes": names}] for names in (5, [5, None], None)),
        *(["generate", "", 1, 2, {"episode": "g.0.0", "tokens": tokens}] for tokens in ("x", None, [])),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status_of("trace", tmp_path, *given)


def test_an_empty_window_leaves_the_timeline_that_is_there(run_dir: Path) -> None:
    status_of("trace", run_dir)
    before = (run_dir / "trace.json.gz").read_bytes()
    assert status_of("trace", run_dir, "--seconds", "80000:90000") == 1
    assert (run_dir / "trace.json.gz").read_bytes() == before
    assert not list(run_dir.glob(".*"))
