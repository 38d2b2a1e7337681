"""Makes the pages of this package from templates: each is one HTML file. Everything that a run wrote is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup

from asyncrl.config.option import as_yaml
from asyncrl.errors import ConfigError
from asyncrl.machine.files import write_whole
from asyncrl.runs.decoding import Decode, decoder, ids_as_text
from asyncrl.runs.environment import Environment
from asyncrl.runs.report.episodes import sample_episodes, visible
from asyncrl.runs.report.plots import data_plots, learning_plots, speed_plots
from asyncrl.runs.report.reported import ReportedRun, read_run
from asyncrl.runs.report.svg import DrawnPlot, Plot, draw, short
from asyncrl.runs.summary_text import summary_rows
from asyncrl.version import VERSION

FOLDER = Path(__file__).parent / "templates"
GIB = 1 << 30
REPORT_FILE = "report.html"


def write_report(name: str, out: Path | None = None) -> Path:
    """Write the report of a run into its folder, or to `out`, and return the file. Raises ConfigError: the run does not
    exist, or its configuration cannot be read; OSError: the file cannot be
    written."""
    run = read_run(name)
    file = out or run.folder / REPORT_FILE
    write_whole(file, run_page(run))
    return file


def page(template: str, title: str, **values: Any) -> str:
    """The text of a page. A run's texts may have characters that hide or reverse other text: the page shows their
    codes."""
    style = Markup((FOLDER / "style.css").read_text())
    rendered = _templates().get_template(template).render(title=title, style=style, version=VERSION, **values)
    return visible(rendered)


@cache
def _templates() -> Templates:
    return Templates(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )


def run_page(run: ReportedRun) -> str:
    """The report of a run."""
    episodes, no_episodes = sample_episodes(run.run, lambda: _decoder(run))
    plots: dict[str, Callable[[ReportedRun], Iterable[Plot]]] = {
        "Learning": learning_plots,
        "Data": data_plots,
        "Speed": speed_plots,
    }
    sections = [(name, drawn(make(run))) for name, make in plots.items()]
    return page(
        "run.html",
        f"{run.name}: report",
        run=run,
        introduction=introduction(run),
        tiles=tiles(run),
        facts=summary_rows(run.summary),
        sections=[(name, found) for name, found in sections if found],
        episodes=episodes,
        no_episodes=no_episodes,
        differing=[(key, run.text_of(key), as_yaml(default)) for key, _, default in run.differing()],
        marks=run.marks(),
        environments=[environment_rows(each) for each in run.environments],
    )


def drawn(plots: Iterable[Plot]) -> list[DrawnPlot]:
    """The plots that have values."""
    return [found for found in map(draw, plots) if found is not None]


def introduction(run: ReportedRun) -> str:
    """Describe the run in a sentence."""
    values = run.values
    data = ", ".join(values["data.train"]) if isinstance(values["data.train"], list) else values["data.train"]
    algorithm = f"{values['algorithm.advantage.name']} with loss {values['algorithm.loss.name']}"
    batch = f"{values['learner.batch_size']} trajectories a step in groups of {values['learner.group_size']}"
    age = f"at most {values['replay.max_lag']} versions old"
    return f"{algorithm} trains {values['model.path']} on {data}: {batch}, {age}. Folder: {run.folder}"


def tiles(run: ReportedRun) -> list[tuple[str, str, str]]:
    """The main numbers: the name, the value, and a remark on each."""
    summary = run.summary
    found = [("steps", f"{summary.steps}", f"of {summary.planned_steps}")]
    changes = {"reward": summary.reward, "held-out accuracy": summary.held_out.get("accuracy")}
    for name, change in changes.items():
        if change is not None:
            found.append((name, short(change.last), f"first {short(change.first)}"))
    if trained := summary.trajectories.get("trained"):
        accepted = sum(summary.trajectories.values())
        found.append(("trajectories", short(trained), f"trained of {short(accepted)} accepted"))
    if {"trained", "evicted"} <= (decided := summary.decided).keys():
        others = ", ".join(f"{short(decided[end]['length'])} {end}" for end in ("sampled", "evicted"))
        found.append(("tokens of a trained episode", short(decided["trained"]["length"]), others))
    if speed := summary.speed:
        found += [
            ("elapsed", _duration(summary.elapsed_s), f"{short(speed['tokens_per_s'])} sampled tokens/s"),
            ("learner idle", f"{speed['learner_idle']:.0%}", f"engine {speed['engine_idle']:.0%}"),
            ("largest lag", f"{speed['max_lag']:.0f}", "versions"),
        ]
    return found


def environment_rows(host: Environment) -> list[tuple[str, str]]:
    """The facts of a host as readable text. Unknown facts are left out."""
    packages = ", ".join(f"{name} {version}" for name, version in (host.packages or {}).items())
    rows = [
        ("host", host.host),
        ("GPUs", "; ".join(host.gpus)),
        ("GPU driver", host.driver),
        ("CPU", f"{host.cpu}, {host.cores} cores that the run may use" if host.cores else host.cpu),
        ("memory", f"{host.memory / GIB:.0f} GiB" if host.memory else ""),
        ("system", host.system),
        ("asyncrl", host.asyncrl),
        ("commit", host.commit),
        ("Python", host.python),
        ("packages", packages),
    ]
    return [(name, text) for name, text in rows if text]


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.0f} s"


def _decoder(run: ReportedRun) -> Decode:
    """The decoder of the run's tokenizer. A run of another version of asyncrl, whose configuration cannot be used, gets
    a decoder that shows token ids."""
    try:
        return decoder(run.run)
    except ConfigError:
        return ids_as_text
