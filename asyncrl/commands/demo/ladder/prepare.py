"""Prepares the files of a run on one rung of the ladder (`tasks.py`): a policy, which is the same for all rungs, and
the rung's tasks. Later runs reuse the files."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.commands.demo import prepare as demo
from asyncrl.commands.demo.ladder.tasks import Rung, ladder_task, rung_expressions
from asyncrl.data.writing import write_tasks

TRAINING_TASKS = 1000
HELD_OUT_TASKS = 128
WARM_START_STEPS = 400

_NOT_PREPARED = ("judge", "prepare", "tools")
"""Code files that do not affect the prepared files."""


@dataclass(frozen=True, slots=True)
class PreparedRung:
    """Two Parquet files, and a model folder with its tokenizer."""

    train: Path
    held_out: Path
    model: Path


def prepare_rung(
    directory: Path, rung: Rung, seed: int, progress: Callable[[str], None], steps: int = WARM_START_STEPS
) -> PreparedRung:
    """The files under `directory`, which are made if they do not exist. `progress` gets lines of text."""
    code = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem not in _NOT_PREPARED]
    code += [Path(demo.__file__).with_name(f"{name}.py") for name in ("tokenizer", "transcripts", "warm_start")]
    model = directory / demo.fingerprint(f"policy {seed} {steps}", code)
    tasks = directory / demo.fingerprint(f"{rung} {seed} {TRAINING_TASKS} {HELD_OUT_TASKS}", code)

    def make_policy(folder: Path) -> None:
        progress(f"preparing the ladder's policy with seed {seed} in {model} (once, 5 to 20 minutes)")
        _make_policy(folder, seed, progress, steps)

    demo.made_once(model, make_policy)
    demo.made_once(tasks, lambda folder: _make_tasks(folder, rung, seed))
    return PreparedRung(tasks / "train.parquet", tasks / "eval.parquet", model)


def _make_policy(folder: Path, seed: int, progress: Callable[[str], None], steps: int) -> None:
    from asyncrl.commands.demo.ladder.transcripts import drawn_batch, ladder_tokenizer
    from asyncrl.commands.demo.warm_start import warm_start

    tokenizer = ladder_tokenizer()
    policy = warm_start(tokenizer, seed, progress, steps, lambda rng: drawn_batch(tokenizer, rng))
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tasks(folder: Path, rung: Rung, seed: int) -> None:
    rng = random.Random(seed)
    held_out = rung_expressions(rung, HELD_OUT_TASKS, rng)
    training = rung_expressions(rung, TRAINING_TASKS, rng, avoid=set(held_out))
    for name, expressions in (("eval", held_out), ("train", training)):
        tasks = [ladder_task(rung, each, name, index, rng) for index, each in enumerate(expressions)]
        write_tasks(folder / f"{name}.parquet", tasks)
