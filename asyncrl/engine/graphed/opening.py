"""Opens the passes of the embedded engine: of fixed shapes if the model allows it, and else of the usual kind."""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.engine.graphed.capture import NoGraphError
from asyncrl.engine.graphed.passes import GraphedPasses
from asyncrl.engine.passes import Passes

logger = logging.getLogger(__name__)


def open_passes(
    model: Any, slots: int, length: int, *, prefill_tokens: int, keep_cache: bool, routed: bool, static: bool
) -> Passes | GraphedPasses:
    """Open the passes of `model`: see the two classes. With `static` they have fixed shapes. If the model does not
    allow this, they are of the usual kind, and the log says why.

    Raises ConfigError: see `Passes`.
    """
    if static:
        attention = model.config.get_text_config()._attn_implementation
        try:
            return _open_graphed(model, slots, length, prefill_tokens, routed)
        except NoGraphError as error:
            model.set_attn_implementation(attention)
            logger.warning("the engine computes without CUDA graphs, so a pass takes several times as long: %s", error)
    return Passes(model, slots, length, keep_cache=keep_cache, routed=routed)


def _open_graphed(model: Any, slots: int, length: int, prefill_tokens: int, routed: bool) -> GraphedPasses:
    if routed:
        raise NoGraphError("engine.return_routed_experts=true reads the experts of each pass")
    return GraphedPasses(model, slots, length, prefill_tokens)
