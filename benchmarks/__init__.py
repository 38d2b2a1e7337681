"""Measures speed and memory. docs/benchmarks.md says which question each module answers."""

from asyncrl.config.quiet import quiet_imports

# The modules import torch and transformers, which would write their warnings above every `--help`.
quiet_imports()
