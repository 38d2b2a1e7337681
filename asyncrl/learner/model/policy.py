"""The policy maps packed token ids to their log-probs.

It is a Hugging Face causal language model, loaded, checked, and sharded with FSDP2. The critic is loaded in the same
way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.images import image_encoder
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.activations import Activations
from asyncrl.learner.model.loading import StoredModel, open_model
from asyncrl.learner.model.lora import with_adapters
from asyncrl.learner.model.packed_check import attend_packed, hidden_states, logit_cap
from asyncrl.learner.model.router_balance import RouterLoads
from asyncrl.learner.model.routing_replay import RoutingReplay
from asyncrl.learner.model.sharding import SMALLEST_COMPILED, Frozen, compiles, parameters_of, shard
from asyncrl.learner.model.value_head import new_value_head, values_of
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.adapters import without_adapters
from asyncrl.modelling.attention import check_positions
from asyncrl.modelling.freezing import freeze
from asyncrl.modelling.logprobs import collision_probabilities, token_logprobs
from asyncrl.modelling.packed_attention import PACKED
from asyncrl.modelling.routers import route_in_float32
from asyncrl.modelling.routing import RoutingShape
from asyncrl.modelling.vision import VisionShape, sees_images
from asyncrl.modelling.weight_format import WeightFormat
from asyncrl.weights.manifest import DTYPES

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """Computes log-probs of packed tokens at `temperature`, by the Hugging Face causal language model `model`, which is
    not sharded yet.

    `weight_format` converts its weights to their published form, and `loads` counts how much its experts are used. With
    `replays_routing` it sends tokens to the experts that a pass names. With a `value_head` it is also the critic, on
    the same backbone.

    Raises ConfigError: see `WeightFormat`, `RoutingReplay` and `image_encoder`.
    """

    activations: Activations
    """The activations that the layers keep for the backward pass. `load_policy` and `load_reference` set them."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        compiled: bool = False,
        replays_routing: bool = False,
        value_head: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.weight_format = WeightFormat(model)
        route_in_float32(model)
        self._replay = RoutingReplay(model) if replays_routing else None
        self.loads = RouterLoads(model)
        self._images = image_encoder(model)
        self._temperature = temperature
        self.is_compiled = compiled

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def shares_prefixes(self) -> bool:
        """True if a pass may compute a prefix once for all sequences that share it."""
        return bool(self.model.get_decoder().config._attn_implementation == PACKED)

    @property
    def vision(self) -> VisionShape | None:
        """The layout of images among the tokens. None: the model reads no images."""
        return None if self._images is None else self._images.shape

    @property
    def replays(self) -> RoutingShape | None:
        """The shape of recorded expert routing, if the model can send tokens to the recorded experts. None: the model
        routes all tokens itself."""
        return None if self._replay is None else self._replay.shape

    def replay_sums(self, packed: PackedSequences) -> dict[str, Tensor]:
        """Return counts of replayed experts in the last pass, which was `packed`: see `RoutingReplay.sums`."""
        return {} if self._replay is None else self._replay.sums(packed)

    @property
    def pads_passes(self) -> bool:
        """True if passes should be padded: compiled layers are faster if passes have few sizes."""
        return self.is_compiled and self.shares_prefixes

    def forward(
        self,
        packed: PackedSequences,
        with_entropy: bool = False,
        temperature: float | None = None,
        with_collisions: bool = False,
        measures: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs float32[N] of tokens, given the earlier tokens of their sequence. Also return the
        entropies float32[N] of the tokens' distributions, or None without `with_entropy`. With `with_collisions`, sums
        of squared probabilities replace the entropies, without gradient. With `measures` and without `with_entropy`,
        the entropies have no gradient, and are 0 at tokens that are not in `packed.measured`. All values are 0 at
        tokens that are not needed. If `temperature` is given, it replaces the policy's.
        """
        states = self._states(packed)
        return self._statistics(states, packed, with_entropy, temperature, with_collisions, measures)

    def with_values(
        self, packed: PackedSequences, with_entropy: bool = False, measures: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the results of `forward`, and values float32[N] from the same pass, for a policy with a value head.
        The values are those of the states in which needed tokens were sampled, and 0 for other tokens."""
        assert self.value_head is not None
        states = self._states(packed)
        values = packed.spread(values_of(self.value_head, states))
        return *self._statistics(states, packed, with_entropy, measures=measures), values

    def values(self, packed: PackedSequences) -> Tensor:
        """Return only the values of `with_values`."""
        assert self.value_head is not None
        return packed.spread(values_of(self.value_head, self._states(packed)))

    def _states(self, packed: PackedSequences) -> Tensor:
        """Compute the hidden states [M, D] in which the needed tokens were sampled."""
        self.loads.begin(packed)
        if self._replay is not None:
            self._replay.begin(packed)
        return hidden_states(self.model.get_decoder(), packed, self._images)[packed.sources]

    def _statistics(
        self,
        states: Tensor,
        packed: PackedSequences,
        with_entropy: bool,
        temperature: float | None = None,
        with_collisions: bool = False,
        measures: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        logprobs, entropy = token_logprobs(
            states,
            packed.targets,
            head,
            temperature or self._temperature,
            with_entropy,
            self.is_compiled,
            cap=logit_cap(self.model.config),
            measured=packed.measured if measures else None,
        )
        if with_collisions:
            entropy = collision_probabilities(
                states, head, temperature or self._temperature, cap=logit_cap(self.model.config)
            )
        return packed.spread(logprobs), None if entropy is None else packed.spread(entropy)


@dataclass(frozen=True, slots=True, eq=False)
class BaseOfPolicy:
    """The model under the adapters of a `policy`: a reference that takes no additional memory."""

    policy: Policy

    def __call__(self, packed: PackedSequences) -> tuple[Tensor, Tensor | None]:
        """Call the policy without its adapters and without replayed experts. Call this under `torch.no_grad`."""
        with without_adapters(self.policy):
            result: tuple[Tensor, Tensor | None] = self.policy(replace(packed, routing=None))
            return result


def load_policy(
    config: ModelConfig,
    temperature: float,
    ranks: Ranks,
    length: int,
    section: str = "model",
    replays_routing: bool = False,
    seed: int = 0,
    with_values: bool = False,
) -> Policy:
    """Load the policy that `config` names, for sequences of at most `length` tokens, sharded over the ranks.

    `section` is the section of the configuration that `config.freeze` and `config.lora` come from. `seed` decides the
    values with which new adapters begin. `replays_routing`: see `Policy`. With `with_values` the policy has a value
    head.

    Raises ConfigError: see `open_decoder`, `freeze`, `with_adapters`, `RoutingReplay`, `new_value_head` and
    `load_sharded`.
    """
    stored = open_decoder(config, ranks, length)
    freeze(stored.model, config.freeze, f"{section}.freeze")
    stored = with_adapters(stored, config.lora, f"{section}.lora", seed)
    hidden = stored.model.config.get_text_config().hidden_size
    head = new_value_head(config, hidden) if with_values else None
    compiled = compiles(config, ranks.device, stored.model)
    if ranks.rank == 0 and ranks.device.type == "cuda" and config.compile is None and not compiled:
        logger.info(
            "%s.path: the layers are not compiled, since compiling pays only for %.0fM parameters or more, and this "
            "model has %.0fM; model.compile=true compiles them",
            *(section, SMALLEST_COMPILED / 1e6, parameters_of(stored.model) / 1e6),
        )
    policy = Policy(stored.model, temperature, compiled, replays_routing, head)
    policy.activations = load_sharded(policy, policy.model, stored, config, ranks, length)
    # Makes FSDP gather the weights also for calls of these methods.
    for method in ("with_values", "values"):
        register_fsdp_forward_method(policy, method)
    return policy


def reference_of(
    policy: Policy, config: ModelConfig, temperature: float, ranks: Ranks, length: int, on_host: bool
) -> Policy | BaseOfPolicy:
    """Return the reference of a run's `policy`: the policy without its adapters, or a separate model if the policy has
    no adapters. Logs a warning if the policy starts with stored adapters: it then differs from the reference already
    at the start.

    Raises ConfigError: see `load_reference`.
    """
    if not config.lora.is_used:
        return load_reference(config, temperature, ranks, length, on_host)
    if config.lora.path is not None and ranks.rank == 0:
        logger.warning(
            "the reference is %s without the adapters of model.lora.path, so the KL does not begin at 0, and pulls the "
            "policy away from where it starts; for the model with these adapters as the reference, merge them first: "
            "asyncrl merge --from %s --to FOLDER, and then model.path=FOLDER model.lora.rank=N",
            *(config.path, config.lora.path),
        )
    return BaseOfPolicy(policy)


def load_reference(config: ModelConfig, temperature: float, ranks: Ranks, length: int, on_host: bool) -> Policy:
    """Load the policy that `config` names as `load_policy` does, but in `config.dtype` and never trained. With
    `on_host` its weights stay in host memory, and a layer's weights are on the device only during its forward pass.

    Raises ConfigError: see `open_decoder` and `load_sharded`.
    """
    stored = open_decoder(config, ranks, length)
    policy = Policy(stored.model, temperature, compiles(config, ranks.device, stored.model))
    policy.activations = load_sharded(policy, policy.model, stored, config, ranks, length, Frozen(on_host))
    return policy


def open_decoder(config: ModelConfig, ranks: Ranks, length: int, with_head: bool = True) -> StoredModel:
    """Open the causal language model that `config` names, for sequences of at most `length` tokens. `with_head`: see
    `open_model`. Raises ConfigError: the model cannot be loaded, or sequences of that length change how it encodes
    positions.
    """
    if config.attention not in ("auto", "sdpa") and ranks.device.type == "cpu":
        raise ConfigError(f"model.attention={config.attention}: training with it needs a GPU; use auto")
    stored = open_model(config, ranks.activity, with_head)
    if sees_images(stored.model.config):
        check_vision(config.path, divides=ranks.context is not None, own_critic=not with_head)
    with _advice(config.path, config):
        check_positions(stored.model.config, length)
    return stored


def check_vision(path: str, divides: bool, own_critic: bool) -> None:
    """Raises ConfigError for the model at `path`, which reads images: ranks would divide its passes or layers, or a
    critic would have a backbone of its own."""
    if own_critic:
        raise ConfigError(
            f"{path!r} reads images, and a critic of its own would see none: use critic.shared, or an advantage "
            "without a critic"
        )
    if divides:
        raise ConfigError(
            f"{path!r} reads images, whose tokens ranks cannot divide: use learner.context_ranks=1 and "
            "learner.tensor_ranks=1"
        )


def load_sharded(
    root: nn.Module,
    model: Any,
    stored: StoredModel,
    config: ModelConfig,
    ranks: Ranks,
    length: int,
    frozen: Frozen | None = None,
) -> Activations:
    """Shard `root`, which holds the Hugging Face `model`, and read this rank's shards of the `stored` weights. Returns
    the object that decides which activations the layers keep.

    Raises ConfigError: the weights cannot be read, or the model cannot be trained packed.
    """
    compiled, dtype = compiles(config, ranks.device, model), DTYPES[config.dtype]
    activations = shard(root, model, config, ranks, frozen)
    device = torch.device("cpu") if frozen is not None and frozen.on_host else ranks.device
    stored.read(root, device, ranks.activity)
    if config.dtype == "float16":
        _check_range(root, stored.model.name_or_path, ranks)
    with _advice(stored.model.name_or_path, config):
        attend_packed(root, stored.model, config.attention, length, ranks, dtype, compiled)
    return activations


def _check_range(root: nn.Module, path: str, ranks: Ranks) -> None:
    """Raises ConfigError on all ranks: a weight on some rank is beyond the range of float16."""
    largest = torch.finfo(torch.float16).max
    shards = (each.to_local() if isinstance(each, DTensor) else each for each in root.parameters())
    if ranks.any(any(bool((each.detach().abs() > largest).any()) for each in shards)):
        raise ConfigError(
            f"{path!r} has weights beyond {largest:g}, which float16 cannot hold; use model.dtype=bfloat16"
        )


@contextmanager
def _advice(path: str, config: ModelConfig) -> Iterator[None]:
    """Extend an error by advice on the options to change."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{path!r} cannot be trained packed with model.attention={config.attention}: {error}; "
            "use another model or attention"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path!r} cannot be loaded with model.attention={config.attention}: {error}") from error
