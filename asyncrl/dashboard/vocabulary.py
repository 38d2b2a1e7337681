"""Loads the tokenizer of a run, to show tokens as text. No code of a model is run, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.option import REQUIRED
from asyncrl.errors import ConfigError
from asyncrl.runs.decoding import Decode, ids_as_text
from asyncrl.runs.run import Run
from asyncrl.text import reason_of


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A run's tokenizer.

    - `decode`: gives the text of token ids, special tokens included;
    - `special`: the ids of the special tokens;
    - `problem`: why `decode` gives ids instead of text; empty if it gives text.
    """

    decode: Decode
    special: frozenset[int] = frozenset()
    problem: str = ""


def load_vocabulary(run: Run) -> Vocabulary:
    """Load the tokenizer of the run's exported model, or else of its `model.path`; show ids if neither loads."""
    problems: list[str] = []
    for path in _folders(run, problems.append):
        try:
            return _load(path)
        # A folder may have any content, and the libraries that read it may raise any exception.
        except Exception as error:  # noqa: BLE001 - the page shows the reason
            problems.append(f"{path}: {reason_of(error)}")
    return Vocabulary(ids_as_text, problem="; ".join(problems) or "the run has no model.path")


def _folders(run: Run, problem: Callable[[str], None]) -> list[str]:
    """The folders in which the tokenizer may be, the best first."""
    found = [str(run.folder / "model")] if (run.folder / "model").is_dir() else []
    try:
        # Only this key is read: the run may be of another version of asyncrl, whose other keys differ.
        path = run.real_values()["model.path"]
    except ConfigError as error:
        problem(f"model.path is unknown: {reason_of(error)}")
        return found
    return [*found, path] if isinstance(path, str) and path != REQUIRED else found


def _load(path: str) -> Vocabulary:
    from tokenizers import Tokenizer

    file = _cached(path, "tokenizer.json")
    if file is None:
        return _load_slow(path)
    tokenizer = Tokenizer.from_file(file)
    special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Vocabulary(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), special)


def _load_slow(path: str) -> Vocabulary:
    """Load the tokenizer of a model that has no tokenizer.json, which only `transformers` can read."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return Vocabulary(
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        frozenset(tokenizer.all_special_ids),
    )


def _cached(path: str, name: str) -> str | None:
    """A file of a model's folder, or of the cache of a model that was downloaded before; `None` if it is missing."""
    if Path(path).is_dir():
        return str(Path(path) / name) if (Path(path) / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, name)
    return found if isinstance(found, str) else None
