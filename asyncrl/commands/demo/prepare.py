"""Prepares the files of the demo: tasks, policy and step scorer. Later runs reuse them.

The folder's name is a hash of the code and the seed. The folder gets this name only when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.commands.demo.arithmetic import arithmetic_task, distinct_expressions
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CACHE = Path(".cache/demo")
SEED = 0
TRAINING_TASKS = 4000
HELD_OUT_TASKS = 200
NO_MAKERS = ("__main__", "summary")
"""Files of this package that do not affect the prepared files. If they change, the prepared files are still used."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort of the preparation.

    - `warm_start`: training updates of the policy
    - `step_scorer`: training updates of the step scorer
    - `judged`: held-out expressions with which the step scorer is tested
    """

    warm_start: int = 180
    step_scorer: int = 150
    judged: int = 200


@dataclass(frozen=True, slots=True)
class Prepared:
    """Two Parquet files of tasks, and two model folders with their tokenizers."""

    train: Path
    held_out: Path
    model: Path
    step_scorer: Path


FULL_EFFORT = Effort()


def prepare_demo(directory: Path, seed: int, progress: Callable[[str], None], effort: Effort = FULL_EFFORT) -> Prepared:
    """The files under `directory`, which are made if they do not exist. `progress` gets lines of text."""
    folder = directory / _fingerprint(seed, effort)

    def make(partial: Path) -> None:
        progress(f"preparing tasks, a warm-started policy and a step scorer in {folder} (once, 1 to 3 minutes)")
        _make(_parts(partial), seed, progress, effort)

    made_once(folder, make)
    return _parts(folder)


def prepared_files(directory: Path, seed: int, effort: Effort = FULL_EFFORT) -> Prepared:
    """The files that `prepare_demo` makes under `directory`. They may not exist yet."""
    return _parts(directory / _fingerprint(seed, effort))


def make_policy(
    folder: Path, directory: Path, seed: int, progress: Callable[[str], None], effort: Effort = FULL_EFFORT
) -> None:
    """Write the policy that the demo trains into a new folder. If there are prepared files under `directory`, the
    policy is copied from them, else it is trained. Raises ConfigError: the folder exists."""
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a new folder")
    prepared = prepared_files(directory, seed, effort).model

    def make(partial: Path) -> None:
        if prepared.exists():
            shutil.copytree(prepared, partial, dirs_exist_ok=True)
            return
        progress(f"training the demo's policy for {folder} (1 to 2 minutes)")
        _save_policy(partial, seed, progress, effort.warm_start)

    made_once(folder, make)


def prepared_overrides(prepared: Prepared) -> list[str]:
    """The words of a command line that trains with the prepared files."""
    return [
        "experiment=demo",
        f"model.path={prepared.model}",
        f"data.train={prepared.train}",
        f"data.eval={prepared.held_out}",
        f"scoring.prm.path={prepared.step_scorer}",
    ]


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a new folder, and then rename it to `folder`. If `folder` exists already, do nothing.

    A second process that needs the folder waits for the first one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        partial.rename(folder)


def _parts(folder: Path) -> Prepared:
    return Prepared(folder / "train.parquet", folder / "eval.parquet", folder / "policy", folder / "step_scorer")


def _fingerprint(seed: int, effort: Effort) -> str:
    return fingerprint(f"{seed} {effort}", sorted(Path(__file__).parent.glob("*.*")))


def fingerprint(text: str, files: Iterable[Path]) -> str:
    """A hash of the text and the files, as a name."""
    digest = hashlib.sha256(text.encode())
    for file in files:
        if file.stem not in NO_MAKERS:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _make(parts: Prepared, seed: int, progress: Callable[[str], None], effort: Effort) -> None:
    from asyncrl.commands.demo.step_scorer import save_step_scorer, train_step_scorer
    from asyncrl.data.writing import write_tasks

    rng = random.Random(seed)
    held_out = distinct_expressions(HELD_OUT_TASKS, rng)
    training = distinct_expressions(TRAINING_TASKS, rng, avoid=set(held_out))
    for path, split, expressions in ((parts.held_out, "eval", held_out), (parts.train, "train", training)):
        write_tasks(path, (arithmetic_task(each, split, index) for index, each in enumerate(expressions)))
    policy, tokenizer = _save_policy(parts.model, seed, progress, effort.warm_start)
    scorer, judgements = train_step_scorer(policy, tokenizer, seed, progress, effort.step_scorer, effort.judged)
    for source, found in judgements.items():
        progress(
            f"the step scorer is right on {found.accuracy:.1%} of {source} steps ({found.right:.1%} are right steps)"
        )
    save_step_scorer(scorer, tokenizer, judgements, parts.step_scorer)


def _save_policy(
    folder: Path, seed: int, progress: Callable[[str], None], steps: int
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Train the policy for `steps` updates, and save it with its tokenizer."""
    from asyncrl.commands.demo.tokenizer import build_tokenizer
    from asyncrl.commands.demo.warm_start import warm_start

    tokenizer = build_tokenizer()
    policy = warm_start(tokenizer, seed, progress, steps)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return policy, tokenizer
