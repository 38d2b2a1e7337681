"""The table of commands of `asyncrl`, and the help of commands that read the configuration. This file imports no
command."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.files import GROUPS, choices
from asyncrl.config.keys import did_you_mean, sections
from asyncrl.config.option import REQUIRED, as_yaml, options, summary
from asyncrl.config.schema import TrainConfig


@dataclass(frozen=True)
class Command:
    """A command, which the `main` of `module` runs. `is_role` is true if its help and its completion are those of a
    role: KEY=VALUE words, and the options in `OPTIONS_HELP`."""

    module: str
    meaning: str
    is_role: bool = False
    subcommands: Sequence[str] = ()


LOOKS = ("status", "list", "step", "show", "changes", "export", "import", "dead-letters")
"""The subcommands of `asyncrl inspect` that change nothing in a run."""
SLOW = ("train", "sft", "resume", "try", "evaluate")
"""The commands that take seconds to load before they print anything."""
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "asyncrl.launch.local", "run everything, here or on a cluster: replay, actors, scorers, learner", True
    ),
    "demo": Command(
        "asyncrl.commands.demo.__main__", "train a tiny calculator policy from scratch, and show the result", True
    ),
    "sft": Command(
        "asyncrl.commands.sft.__main__", "fine-tune a model on demonstrations, before or instead of `train`", True
    ),
    "resume": Command(
        "asyncrl.launch.resume", "continue a run with its recorded configuration: `asyncrl resume RUN [KEY=VALUE]`"
    ),
    "stop": Command(
        "asyncrl.launch.stop",
        "stop a run that was started in another terminal or on another machine: `asyncrl stop RUN`",
    ),
    "scale": Command(
        "asyncrl.launch.scaling",
        "change the number of actors or scorers of a running run: `asyncrl scale RUN actors=8`",
    ),
    "status": Command("asyncrl.runs.inspect.__main__", "watch a run: `asyncrl status RUN`"),
    "dashboard": Command(
        "asyncrl.dashboard.__main__", "serve a web page with figures and episodes: `asyncrl dashboard RUN...`"
    ),
    "inspect": Command(
        "asyncrl.runs.inspect.__main__",
        f"look at a run: {', '.join(LOOKS)}",
        False,
        (*LOOKS, "requeue", "discard", "skip-plan"),
    ),
    "trace": Command(
        "asyncrl.runs.trace.__main__",
        "write the timeline of a run for Perfetto, or show why a step or an episode took long",
    ),
    "report": Command("asyncrl.runs.report.__main__", "write a run as one HTML page: `asyncrl report RUN`"),
    "compare": Command(
        "asyncrl.runs.report.compare",
        "compare the configurations and results of runs: `asyncrl compare RUN RUN`",
    ),
    "try": Command(
        "asyncrl.commands.trial.__main__",
        "play one episode of a task and show each turn: `asyncrl try TASKS --index 3`",
    ),
    "evaluate": Command(
        "asyncrl.commands.evaluate.__main__", "measure pass@k of a run or a model on tasks, without training"
    ),
    "export": Command("asyncrl.commands.export", "write the policy of a checkpoint as a Hugging Face folder"),
    "merge": Command(
        "asyncrl.commands.merge.merge", "make a Hugging Face folder from checkpoint shards of asyncrl, verl or Megatron"
    ),
    "push-to-hub": Command(
        "asyncrl.commands.hub.push_to_hub", "upload an exported model with its card to the Hugging Face hub"
    ),
    "data": Command(
        "asyncrl.data.command",
        "make task files from published data sets: `asyncrl data --help`",
        False,
        ("gsm8k", "math", "dapo", "search", "code", "tools", "reasoning-gym"),
    ),
    "plan": Command("asyncrl.capacity.command", "forecast speed, idle shares and cost of a run on other GPUs"),
    "doctor": Command("asyncrl.launch.doctor.doctor", "check this host, and print each problem with its fix"),
    "keys": Command(
        "asyncrl.commands.keys",
        "make keys that encrypt a run's connections and keep others out: `asyncrl keys --out DIR`",
    ),
    "algorithms": Command("asyncrl.algorithms.docs", "list every advantage, loss, correction, KL and aggregation"),
    "from-verl": Command(
        "asyncrl.compat.verl.configuration.command", "translate a configuration of verl into keys of asyncrl"
    ),
    "from-trl": Command(
        "asyncrl.compat.trl.command", "translate a script or a configuration of TRL's GRPO into keys of asyncrl"
    ),
    "completion": Command(
        "asyncrl.config.completion", "print the completion script of a shell", False, ("bash", "zsh")
    ),
    "replay": Command("asyncrl.replay.__main__", "serve the replay of a run", True),
    "actor": Command("asyncrl.actor.__main__", "run episodes", True),
    "scoring": Command("asyncrl.scoring.__main__", "verify and score trajectories", True),
    "learner": Command("asyncrl.learner.__main__", "train the policy and publish its weights", True),
}

OPTIONS_HELP = """options:
  KEY=VALUE         set a key, such as learner.steps=100 or actor.tools=[calculator,python]
  GROUP=NAME        choose a file of a group, such as algorithm=dapo
  GROUP=FILE.yaml   choose a file of your own, such as experiment=./mine.yaml
  FILE.yaml         the same as experiment=FILE.yaml
  --cfg job         print the configuration that would run
  --config-dir DIR  find files of groups in DIR too, such as DIR/experiment/NAME.yaml
  --help [SECTION]  print this text, or the keys of a section
"""
PLAN_HELP = """  --plan            print which process would run where, and start nothing
  --plan=N          the same for N hosts with cluster.gpus and cluster.cpus each; contacts no host
  --plan=pools      the same with a host for each node of cluster.pools; contacts no host
"""
DEMO_HELP = """  --json            also print the results as a last line of JSON
  --model-only DIR  only make the policy that the demo trains, as a Hugging Face folder
"""


def usage() -> str:
    """The help of `asyncrl`."""
    lines = [f"  {name:<11} {command.meaning}\n" for name, command in COMMANDS.items()]
    return (
        "usage: asyncrl COMMAND [--help] [KEY=VALUE ...]\n"
        "       asyncrl --version\n\n"
        "Asynchronous off-policy reinforcement learning of tool-calling language models.\n\n"
        f"commands:\n{''.join(lines)}"
    )


def command_name() -> str:
    """The command of this process as a user writes it, such as `asyncrl train`."""
    program = Path(sys.argv[0])
    return f"asyncrl {program.parent.name}" if program.name == "__main__.py" else program.name


def runnable(program: Path | None = None) -> str:
    """The first word of a command that a user can paste into a shell. It is the path of the file `program`, or
    `asyncrl` if the shell finds this file by that name, or if the file does not exist. By default, `program` is the
    `asyncrl` next to the running Python interpreter."""
    program = program or Path(sys.executable).with_name("asyncrl")
    found = shutil.which("asyncrl")
    if not program.exists() or (found is not None and Path(found).resolve() == program.resolve()):
        return "asyncrl"
    inside = program.is_relative_to(Path.cwd())
    return shlex.quote(str(program.relative_to(Path.cwd()) if inside else program))


def show_role_help(arguments: Sequence[str]) -> int:
    """Print the help of a role, or of the sections in `arguments`. Return the exit status, which is 2 for an unknown
    section."""
    words = [word for word in arguments if not word.startswith("-") and "=" not in word]
    by_name = {prefix.rstrip("."): section for prefix, section in sections(TrainConfig()) if prefix}
    for word in words:
        if word not in by_name:
            sys.stderr.write(f"asyncrl: {word}: there is no such section{did_you_mean(word, by_name)}\n")
            return 2
    text = "".join(_section_help(word, by_name[word]) for word in words)
    sys.stdout.write(text or "".join(_role_help(command_name(), by_name)))
    return 0


def _role_help(name: str, by_name: Mapping[str, Any]) -> Iterator[str]:
    command = name.split()[-1]
    meaning = COMMANDS[command].meaning if command in COMMANDS else ""
    plans, demo = command in ("train", "demo"), DEMO_HELP if command == "demo" else ""
    plan = " [--plan[=N|pools]]" if plans else ""
    yield f"usage: {name} [KEY=VALUE ...]{plan} [--cfg job] [--config-dir DIR] [--help [SECTION]]\n\n"
    yield f"{meaning[:1].upper()}{meaning[1:]}.\n\n" if meaning else ""
    yield OPTIONS_HELP + (PLAN_HELP if plans else "") + demo + "\ngroups:\n"
    yield from (f"  {group:<11} {', '.join(choices(group))}\n" for group in GROUPS)
    yield "\nsections:\n"
    yield from (f"  {section:<22} {summary(type(declared))}\n" for section, declared in by_name.items())


def _section_help(name: str, section: Any) -> str:
    lines = [f"{name}: {summary(type(section))}\n"]
    for option in options(type(section)):
        default = "" if option.default == REQUIRED else f" (default {as_yaml(option.default)})"
        lines.append(f"\n  {name}.{option.name}: {option.allowed}{default}\n      {option.meaning}\n")
    return "".join(lines)
