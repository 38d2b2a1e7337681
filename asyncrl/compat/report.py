"""Translates a configuration of another trainer with a table of rows, and reports the differences.

`asyncrl from-verl` and `asyncrl from-trl` use it, so their reports and experiment files have the same form.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from asyncrl.compat.rows import Row, Setting
from asyncrl.config.compose import read
from asyncrl.config.keys import OPTIONS, did_you_mean
from asyncrl.config.option import as_yaml
from asyncrl.errors import ConfigError
from asyncrl.masking import masked


class OtherConfig(Protocol):
    """A configuration of another trainer. A key that is not set has the trainer's default."""

    def __getitem__(self, key: str) -> Any: ...


@dataclass(frozen=True)
class Translated:
    """The result of a translation.

    - `trainer`: the name of the other trainer
    - `settings`: our keys with their values
    - `differs`: lines about values that could not be copied exactly
    - `without`: lines about keys without a counterpart, except those in `off`
    - `unknown`: lines about keys that the table does not know
    - `off`: keys that have no counterpart and need none, since their value turns a feature off
    - `idle`: lines about keys that have a counterpart, but change nothing together with the other values
    """

    trainer: str
    settings: Mapping[str, Any]
    differs: tuple[str, ...]
    without: tuple[str, ...]
    unknown: tuple[str, ...]
    off: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def report(self) -> Iterator[str]:
        """The lines of the whole report."""
        parts = {
            "Different here:": self.differs,
            "No effect together with the other values:": self.idle,
            "No counterpart:": self.without,
            "Unknown, and left out:": self.unknown,
            f"Turned off in {self.trainer}, and left out:": (", ".join(self.off),) if self.off else (),
        }
        for title, lines in parts.items():
            if lines:
                yield title
                yield from (f"  {line}" for line in lines)


@dataclass(frozen=True)
class Table:
    """The rows of a trainer's keys, in the order in which the report has them.

    `row_of` finds the row of a key, and returns None for an unknown key.
    `version` names the trainer with its release, for messages about unknown keys.
    """

    rows: Sequence[Row]
    row_of: Callable[[str], Row | None]
    trainer: str
    version: str

    def settings(self, source: OtherConfig) -> Iterator[Setting | str]:
        """Yield the settings of all rows, and remarks on values that cannot be copied exactly."""
        for row in self.rows:
            try:
                yield from row.translate(source) if row.translate else ()
            except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
                shown = self.with_value(row.there[0], source)
                yield f"{shown}: this value or a related one is wrong, and is left out: {error}"

    def translated(
        self,
        source: OtherConfig,
        given: Sequence[str],
        settings: Mapping[str, Any],
        differs: Sequence[str],
        idle: Sequence[str] = (),
    ) -> Translated:
        """Make the result. It has `settings` in the order of asyncrl's keys, and the lines `differs`.

        It also has lines about `given` keys that have no counterpart or are unknown, and about the keys in `idle`,
        which change nothing.
        """
        without, off = self._without(source, given)
        names = [each.removesuffix(".*") for row in self.rows for each in row.there]
        unknown = [
            f"{self.with_value(key, source)}: {self.version} lacks this key{did_you_mean(key, names)}"
            for key in given
            if self.row_of(key) is None
        ]
        order = {key: number for number, key in enumerate(OPTIONS)}
        ordered = dict(sorted(settings.items(), key=lambda each: order.get(each[0], len(order))))
        unused = tuple(self._idle(idle, source))
        return Translated(self.trainer, ordered, tuple(differs), tuple(without), tuple(unknown), tuple(off), unused)

    def with_value(self, key: str, source: OtherConfig) -> str:
        """The key and its value, as `key=value`."""
        # The name of an unknown key may say that its value is a secret, which is then masked. The trainer's own keys
        # hold no secrets, although the names of some end with `_key`.
        return f"{key}={as_yaml(masked(source[key], '' if self.row_of(key) else key.rpartition('.')[2]))}"

    def _idle(self, keys: Sequence[str], source: OtherConfig) -> Iterator[str]:
        for key in keys:
            row = self.row_of(key)
            if row is not None and row.alias_of:
                row = self.row_of(row.alias_of)
            if row is not None:
                counterpart = f", for {row.here}" if row.here else ""
                yield f"{self.with_value(key, source)}{counterpart}: {row.sentence}".replace("`", "")

    def _without(self, source: OtherConfig, given: Sequence[str]) -> tuple[list[str], list[str]]:
        """The lines about `given` keys without a counterpart, and the keys whose value turns a feature off."""
        lines, off = [], []
        rows = ((key, row) for key in given if (row := self.row_of(key)) is not None and row.is_without)
        by_row = sorted(rows, key=lambda each: self.rows.index(each[1]))
        for row, keys in itertools.groupby(by_row, key=lambda each: each[1]):
            named = [key for key, _ in keys]
            said = [key for key in named if source[key] not in (None, False, "", [], {}, -1)]
            off += [key for key in named if key not in said]
            if said:
                lines.append(f"{', '.join(self._shown(row, said, source))}: {row.sentence.replace('`', '')}")
        return lines, off

    def _shown(self, row: Row, keys: Sequence[str], source: OtherConfig) -> Iterator[str]:
        """Yield the keys that the row names one by one, each with its value. Then, for each section that the row names
        as `SECTION.*`, yield the number of its keys."""
        whole: Counter[str] = Counter()
        for key in keys:
            sections = [each for each in row.there if each.endswith(".*") and key.startswith(each[:-1])]
            if sections:
                whole[sections[0]] += 1
            else:
                yield self.with_value(key, source)
        yield from (f"{section} ({number} keys)" for section, number in whole.items())


def experiment(translated: Translated) -> DictConfig:
    """The settings as the nested keys of an experiment file."""
    content = OmegaConf.create({})
    for key, value in translated.settings.items():
        OmegaConf.update(content, key, value, force_add=True)
    return content


def experiment_text(translated: Translated, out: Path | None) -> str:
    """The text of the experiment file. Its first line is a comment with the command that trains from the file `out`."""
    name = out or Path("mine.yaml")
    start = f"asyncrl train experiment={name if name.is_absolute() else f'./{name}'}"
    return f"# From {translated.trainer}: {start}\n{OmegaConf.to_yaml(experiment(translated))}"


def refused(text: str) -> Iterator[str]:
    """The errors in the text of an experiment file, one per line. Missing data files are not an error."""
    from asyncrl.algorithms.from_config import composition_of  # Imported late: it loads torch, which takes seconds.

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.yaml"
        file.write_text(text)
        try:
            config = read([f"experiment={file}"], names_missing_data=False)
            composition_of(config.algorithm, config.learner.minibatches)
        except ConfigError as error:
            yield from (f"  {line.replace(f'{file}: ', '')}" for line in str(error).splitlines())


def write(text: str, report: Sequence[str], out: Path | None) -> None:
    """Write the experiment file to `out`, and the report to the terminal. The file also has the report, as comments.

    Without `out`, write only the content of the experiment file, to the terminal.
    """
    whole = "".join(f"# {line}\n" for line in report) + text
    if out is None:
        sys.stdout.write(whole)
    else:
        out.write_text(whole)
        sys.stdout.write("".join(f"{line}\n" for line in report))
