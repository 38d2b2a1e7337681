"""Renders the demonstrations of a run as the configuration describes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from asyncrl.chat.from_config import open_chat
from asyncrl.config.schema import TrainConfig
from asyncrl.data.demonstrations import DemonstrationFile
from asyncrl.data.from_config import run_demonstrations
from asyncrl.data.rendered import RenderedDemonstrations
from asyncrl.episode.demonstrations import found_or_rendered, render_file
from asyncrl.modelling.tokenizer import tokenizer_source, written_template
from asyncrl.tools.offered import Offer


def prepare_demonstrations(
    config: TrainConfig, sources: Sequence[str], stop: threading.Event | None = None
) -> RenderedDemonstrations:
    """Render the demonstrations of `sources` into the run's folder, or find them there.

    Raises DataError for the reasons of `render_file` and `DemonstrationFile`; ConfigError: the chat template or a tool
    cannot be used; StoppedError: `stop` was set meanwhile.
    """
    run, overlong = run_demonstrations(config), config.algorithm.sft.overlong
    tokenizer = Path(tokenizer_source(config.model).path)

    functions = Offer(config.actor).always

    def render(file: DemonstrationFile) -> RenderedDemonstrations:
        return render_file(open_chat(config), file, functions, run.max_tokens, overlong, stop)

    # The folder's name depends on the path of the template and the names of the tools, but not on their contents.
    settings = repr([written_template(config.model), config.actor.end_tokens, functions])
    return found_or_rendered(run.folder(sources), sources, tokenizer, render, stop, settings)
