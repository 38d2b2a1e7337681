"""Writes the model card for the Hugging Face hub: README.md in the folder of an exported model, with a picture of its
training.

A card ends with a comment that has a checksum of its text. A card that somebody wrote or changed has another checksum
or none, and is never replaced.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml

from asyncrl.config.locations import CARD_FILES
from asyncrl.config.option import as_yaml
from asyncrl.machine.files import write_whole
from asyncrl.runs.environment import Environment
from asyncrl.runs.lines import Row
from asyncrl.runs.run import Run
from asyncrl.version import VERSION

CARD, PICTURE = CARD_FILES
HERE = "."
"""The model's path in its card: the card is in the same folder."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DATASET = re.compile(r"(?:hf://datasets/|hub:)([\w.-]+/[\w.-]+)")
SETTINGS = (
    *("learner.steps", "learner.epochs", "learner.batch_size", "learner.group_size", "learner.minibatches"),
    *("learner.optimizer", "learner.lr", "learner.schedule", "learner.warmup_steps", "learner.max_grad_norm"),
    *("model.dtype", "actor.temperature", "actor.max_tokens", "replay.max_lag", "run.seed"),
)
VERL = "verl"
"""The value of `actor.agent` for agent loops of verl."""
FUNCTIONS = "function_tool_path"
BRING_TOOLS = (
    *("actor.agent", "actor.agent_command", "actor.agent_sessions"),
    *("actor.environment", "actor.environments"),
)
"""Options whose agents or environments have tools of their own."""
_SEAL = re.compile(r"\n<!-- asyncrl wrote this card \(([0-9a-f]{16})\).*?-->\n\Z", re.S)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The facts in a card.

    - `values`: the configuration by key;
    - `steps`, `evaluations`: rows of the metrics, up to the step of the exported weights;
    - `environment`: the hardware and versions; `None` if the run has no record of them.
    """

    name: str
    values: Mapping[str, Any]
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    environment: Environment | None


def write_card(run: Run, folder: Path, steps: int | None = None) -> bool:
    """Write the card and its picture into `folder`, which has the model that a run exported after `steps` steps (None:
    at its end). If somebody wrote or changed the card in the folder, replace nothing and return False.

    Raises ConfigError: the run's configuration cannot be read; OSError: a file cannot be read or written.
    """
    if (folder / CARD).exists() and not is_ours((folder / CARD).read_text(errors="replace")):
        log.info("%s was written or changed by hand, so it is not replaced", folder / CARD)
        return False
    model = trained_model(run, steps)
    draw_training(model.steps, model.evaluations, folder / PICTURE)
    write_whole(folder / CARD, card(model))
    return True


def is_ours(text: str) -> bool:
    """True if asyncrl wrote the card and it was not changed."""
    seal = _SEAL.search(text)
    return seal is not None and seal[1] == _checksum(text[: seal.start()])


def named(text: str, name: str) -> str:
    """The card `text` with `name` as the model's path, or as its name on the hub. A card that somebody wrote does not
    change."""
    if not is_ours(text):
        return text
    body = _SEAL.sub("", text).replace(f"path = {json.dumps(HERE)}", f"path = {json.dumps(name)}")
    return _sealed(body)


def trained_model(run: Run, steps: int | None = None) -> TrainedModel:
    """The facts of a run about its model after `steps` steps, or at the end of the run if `steps` is None. Raises
    ConfigError: the run's configuration cannot be read."""
    rows, evaluations = run.sampled_rows("learner"), run.sampled_rows("evaluation")
    if steps is not None:
        rows = [row for row in rows if row["step"] < steps]
        evaluations = [row for row in evaluations if row["step"] <= steps]
    return TrainedModel(
        name=run.name,
        values=run.values(),
        steps=[row for row in rows if "reward/mean" in row],
        evaluations=sorted(evaluations, key=lambda row: row["step"]),
        environment=next(iter(run.environments()), None),
    )


def draw_training(steps: Sequence[Row], evaluations: Sequence[Row], picture: Path) -> None:
    """Draw curves over the learner's steps as a PNG: outcome and held-out accuracy at the top, reward at the bottom."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    at = [row["step"] + 1 for row in steps]
    top.plot(at, [row.get("outcome/mean") for row in steps], color="0.6", label="outcome of the training batch")
    top.plot(
        [row["step"] for row in evaluations],
        [row.get("eval/accuracy") for row in evaluations],
        "o-",
        label="accuracy on held-out tasks",
    )
    bottom.plot(at, [row.get("reward/mean") for row in steps], color="C2", label="reward of the training batch")
    bottom.set(xlabel="learner step")
    for axes in (top, bottom):
        axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def card(model: TrainedModel) -> str:
    """The text of the card, with its front matter."""
    front = yaml.safe_dump(_front(model), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{front}---\n",
        f"# {_plain(model.name)}\n",
        *_introduction(model),
        *_numbers(model),
        f"![Outcome of the training batches and accuracy on held-out tasks, by step]({PICTURE})\n",
        *_loading(model),
        *_training(model),
        *_limits(model),
    ]
    # A configuration may have characters that UTF-8 cannot encode.
    return _sealed("\n".join(parts).encode(errors="backslashreplace").decode())


def _front(model: TrainedModel) -> dict[str, Any]:
    base, datasets = model.values["model.path"], _datasets(model)
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if _is_on_hub(base):
        front |= {"base_model": base, "base_model_relation": "finetune"}
    if datasets:
        front["datasets"] = datasets
    tags = ["reinforcement-learning", "asyncrl", str(model.values["algorithm.advantage.name"])]
    return {**front, "tags": [*tags, "tool-use"] if _tools(model) else tags}


def _introduction(model: TrainedModel) -> Iterator[str]:
    base = model.values["model.path"]
    origin = (
        f"[{base}](https://huggingface.co/{base})" if _is_on_hub(base) else f"a local model, `{_plain(_last(base))}`"
    )
    data = ", ".join(f"`{_plain(_last(each))}`" for each in _listed(model.values["data.train"]))
    yield (
        f"A policy that [asyncrl](https://github.com/asyncrl/asyncrl) {_version(model)} trained by reinforcement "
        f"learning. It began as {origin}, and was trained on the tasks in {data}.\n"
    )
    if tools := _tools(model):
        yield f"During training it could call these tools: {', '.join(f'`{_plain(each)}`' for each in tools)}.\n"
    if loops := _loops(model):
        yield f"Agent loops written for verl played its episodes: {', '.join(f'`{_plain(each)}`' for each in loops)}.\n"


def _numbers(model: TrainedModel) -> Iterator[str]:
    yield "## Results\n"
    rows = [
        (f"{kind} {name}", *(values[at].get(key) for at in (0, -1)))
        for values, kind, keys in (
            (model.evaluations, "held-out", ("eval/accuracy", "eval/outcome", "eval/reward")),
            (model.steps, "training batches:", ("outcome/mean", "reward/mean")),
        )
        for key in keys
        if values and (name := key.removeprefix("eval/").removesuffix("/mean"))
    ]
    if rows:
        yield "| | first | last |\n| --- | --- | --- |"
        yield "".join(f"| {name} | {_number(first)} | {_number(last)} |\n" for name, first, last in rows)
    if model.evaluations:
        last = model.evaluations[-1]
        count = last.get("eval/failed", 0)
        failed = f"; the means leave out {count:.0f} failed attempts" if count > 0 else ""
        attempts = f"{_number(last.get('eval/count'))} attempts"
        yield (
            f"Held-out values were measured before training and after step {last['step']}, over {attempts}{failed}. "
            "Accuracy is the share of attempts with an outcome of 1 or more.\n"
        )


def _loading(model: TrainedModel) -> Iterator[str]:
    trust = ", trust_remote_code=True" if model.values["model.trust_remote_code"] else ""
    yield "## How to load it\n"
    yield (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"path = {json.dumps(HERE)}\n"
        f"tokenizer = AutoTokenizer.from_pretrained(path{trust})\n"
        f'model = AutoModelForCausalLM.from_pretrained(path, dtype="auto"{trust})\n\n'
        'messages = [{"role": "user", "content": "2+3="}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
        ")\n"
        "output = model.generate(**inputs, max_new_tokens=64)\n"
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))\n'
        "```\n"
    )
    if _tools(model):
        yield (
            "This prints one message of the model, and runs no tools. Your program has to run the calls of tools in "
            "the message, and to append their results to `messages`.\n"
        )


def _training(model: TrainedModel) -> Iterator[str]:
    values = model.values
    yield "## How it was trained\n"
    algorithm = {
        key.removeprefix("algorithm.").removesuffix(".name"): as_yaml(value)
        for key, value in values.items()
        if key.startswith("algorithm.") and value not in ([], {}, None) and _is_used(key, model)
    }
    yield "| part of the algorithm | value |\n| --- | --- |"
    yield "".join(f"| {name} | `{_plain(value)}` |\n" for name, value in algorithm.items())
    yield "| setting | value |\n| --- | --- |"
    yield "".join(f"| {key} | `{_plain(as_yaml(values[key]))}` |\n" for key in SETTINGS if values[key] is not None)
    if model.steps:
        last = model.steps[-1]
        trained = f"{last['step'] + 1} steps trained {_number(last.get('trajectories_trained'))} trajectories"
        lag = values["replay.max_lag"]
        age = f"Trained tokens were at most {lag} versions older than the weights that they trained"
        yield f"{trained}. {age if lag else 'Training was on-policy'}.\n"
    if environment := model.environment:
        hardware = f"{environment.cores} CPU cores ({_plain(environment.cpu)})"
        if environment.gpus:
            hardware = f"{len(environment.gpus)} GPUs ({_plain(environment.gpus[0])}), {hardware}"
        packages = environment.packages or {}
        versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages)
        yield f"Hardware of the first host: {hardware}. Software: asyncrl {_version(model)}, {versions}.\n"


def _limits(model: TrainedModel) -> Iterator[str]:
    yield "## Limits\n"
    yield (
        f"- These numbers are of one run with one seed ({model.values['run.seed']}). Another seed gives other numbers."
    )
    if model.evaluations:
        yield "- Nothing was measured on other tasks than those of `data.eval`."
    else:
        yield "- Nothing was measured on held-out tasks. The training batches say little about new tasks."
    yield "- The model was trained to get a high reward. It may have learned to use faults of the reward."
    yield "- Abilities that were not trained may be worse than those of the base model. Safety was not examined."
    if _tools(model):
        yield "- It writes calls of tools. Run them with few rights, in a sandbox."


def _is_used(key: str, model: TrainedModel) -> bool:
    """True if the training read this key of the algorithm. Keys of the critic count only in a run with a
    critic, and keys of demonstrations only in a run with demonstrations."""
    if key.startswith("algorithm.sft.") and not model.values["algorithm.sft.path"]:
        return False
    return not key.startswith("algorithm.value") or any("value/bias" in row for row in model.steps)


def _sealed(body: str) -> str:
    seal = f"asyncrl wrote this card ({_checksum(body)}), and replaces it at the next export unless somebody changes it"
    return f"{body}\n<!-- {seal} -->\n"


def _checksum(text: str) -> str:
    return xxhash.xxh64_hexdigest(text.encode())


def _version(model: TrainedModel) -> str:
    return model.environment.asyncrl if model.environment else VERSION


def _is_on_hub(path: str) -> bool:
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def _datasets(model: TrainedModel) -> list[str]:
    found = (DATASET.match(each) for each in _listed(model.values["data.train"]))
    return list(dict.fromkeys(match[1] for match in found if match))


def _listed(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _last(path: str) -> str:
    """The last part of a local path, since the whole path may show private names of the machine. An address of the hub
    stays whole."""
    return path if path.startswith(("hf://", "hub:")) else Path(path).name


def _tools(model: TrainedModel) -> list[str]:
    """The names of the tools that the policy could call, and of files that define tools. Empty if an agent or an
    environment brings its own tools, since the configuration does not list such tools."""
    values = model.values
    if values["actor.agent"] == VERL:
        turns: Any = values["actor.agent_options"]
        for name in ("config", "actor_rollout_ref", "rollout", "multi_turn"):
            turns = turns.get(name) or {}
        return [_last(str(turns[name])) for name in ("tool_config_path", FUNCTIONS) if turns.get(name)]
    if any(values[key] for key in BRING_TOOLS):
        return []
    classes = (each.get("class_name") or _last(str(each[FUNCTIONS])) for each in values["actor.verl_tools"])
    return [*map(str, values["actor.tools"]), *map(str, classes), *map(str, values["actor.mcp_servers"])]


def _loops(model: TrainedModel) -> list[str]:
    """The default agent loop of verl, and the name of the file that lists further loops, if there is one. Empty if no
    loops of verl played the episodes."""
    if model.values["actor.agent"] != VERL:
        return []
    options = model.values["actor.agent_options"]
    listed = options.get("agent_loop_config_path")
    return [str(options.get("default_agent_loop", "single_turn_agent")), *([_last(str(listed))] if listed else [])]


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    is_whole = isinstance(value, int) or value.is_integer()
    return f"{value:.0f}" if is_whole and abs(value) >= 2 else f"{value:.3g}"


def _plain(text: str) -> str:
    """Text without characters that could end a cell of a table, code or a comment."""
    return re.sub(r"[\s|`<>]+", " ", text).strip()
