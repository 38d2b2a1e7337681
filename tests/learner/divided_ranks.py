"""Run as ranks by test_divided_ranks.py: tiny models compute passes whose tokens, layers or experts several ranks
divide, and whole runs are trained so. One start of so many ranks does all that TABLE has for them, and writes down the
results.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.locations import run_dir
from asyncrl.config.schema import CriticConfig, LearnerConfig, ModelConfig, TrainConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.compiling import compile_passes
from asyncrl.learner.from_config import run_settings
from asyncrl.learner.model import tensor_slices
from asyncrl.learner.model.canary import canary_of
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy, load_reference
from asyncrl.learner.model.tensor_slices import Slices, gather_slice, sliced_product
from asyncrl.learner.ranks.joining import context_group, joined
from asyncrl.learner.ranks.ranks import EXPERT_MESH, Ranks, shard_of
from asyncrl.learner.trainer import Trainer
from asyncrl.runs.kept import KeptEpisodes
from tests.helpers import GENEROUS_S
from tests.learner.model.test_other_models import RepeatingReplay, prime
from tests.learner.support import VOCABULARY, PlannedReplay, Run, make_config, random_sequences, with_critic
from tests.learner.two_ranks import fine_tuned, stop_one_of_two, with_frozen
from tests.mixtures import save_mixture

TEMPERATURE = 0.7
SIZES = {"hidden_size": 48, "intermediate_size": 24, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
EXTRAS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "gemma2": {"sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
}
UNEVEN = {"intermediate_size": 22}
"""Neurons that two ranks divide in other places than four ranks their rows."""
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "tokens": {
        "qwen3 4/2": {},
        "llama 6/3": {},
        "gemma2 4/2": {},
        "gemma2 3/1": {},
        "gpt_oss 4/1": {},
        "gpt_oss 3/3": {},
    },
    "layers": {
        "qwen3 4/2": UNEVEN | {"tie_word_embeddings": True},
        "qwen3 4/4": {"tie_word_embeddings": False},
        "llama 6/2": UNEVEN | {"tie_word_embeddings": False},
        "llama 4/1": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "qwen2 4/2": UNEVEN | {"tie_word_embeddings": False},
        "gemma2 4/2": UNEVEN,
    },
}
"""Models by family, heads and heads of keys, for the division of tokens and of layers. Those for layers are with biases
and without, and with one matrix for embedding and head."""
EXPERTS = ("qwen3_moe", "gpt_oss", "glm4_moe")
"""Mixtures for the division of experts: without biases, with them, and with routers that have a buffer."""
RUNS = {
    "tokens": ("alike", "lonely", "critic", "replayed", "implicit"),
    "layers": ("alike", "lonely", "critic", "implicit", "shared", "frozen"),
    "experts": EXPERTS,
}
"""The runs that are trained with each division."""


@dataclass(frozen=True)
class Arrangement:
    """A division of `what` over `ranks`, so many `together`, with so many copies of a model. Passes of the models
    `families` and the RUNS of the division are those of one rank. Ranks that divide experts may also divide the tokens
    of a pass: `context` of them together."""

    ranks: int
    what: str
    together: int
    replicas: int
    families: tuple[str, ...]
    context: int = 1

    def __str__(self) -> str:
        tokens = f" and tokens by {self.context}" if self.context > 1 else ""
        return f"{self.ranks} ranks, {self.what} by {self.together}{tokens}, {self.replicas} copies"

    def of(self, ranks: Ranks) -> Ranks:
        """The ranks so arranged."""
        shards, kind = ranks.size // self.replicas, ranks.device.type
        own = ranks
        if self.replicas > 1:
            names = ("replicas", "shards")
            own = replace(own, mesh=init_device_mesh(kind, (self.replicas, shards), mesh_dim_names=names))
        if self.what == "experts":
            shape = (self.replicas, self.together, shards // self.together)
            own = replace(own, expert_mesh=init_device_mesh(kind, shape, mesh_dim_names=EXPERT_MESH))
        together = self.context if self.what == "experts" else self.together
        if together == 1:
            return own
        limit = timedelta(seconds=GENEROUS_S)
        return replace(own, context=context_group(ranks.rank, ranks.size, together, limit, self.what == "layers"))


TABLE = (
    Arrangement(2, "tokens", 2, 1, ("qwen3 4/2", "llama 6/3", "gemma2 3/1", "gpt_oss 4/1")),
    Arrangement(4, "tokens", 4, 1, ("llama 6/3", "gpt_oss 4/1")),
    Arrangement(4, "tokens", 2, 1, ("gemma2 4/2", "gpt_oss 3/3")),
    Arrangement(4, "tokens", 2, 2, ("qwen3 4/2",)),
    Arrangement(2, "layers", 2, 1, ("qwen3 4/2", "llama 6/2", "llama 4/1")),
    Arrangement(4, "layers", 2, 1, ("qwen3 4/2", "llama 6/2", "qwen2 4/2", "gemma2 4/2")),
    Arrangement(4, "layers", 4, 1, ("llama 4/1", "qwen3 4/4")),
    Arrangement(4, "layers", 2, 2, ("llama 4/1",)),
    Arrangement(2, "experts", 2, 1, EXPERTS),
    Arrangement(4, "experts", 2, 1, EXPERTS),
    Arrangement(4, "experts", 2, 2, EXPERTS),
    Arrangement(4, "experts", 4, 1, EXPERTS, context=2),
)
PAIR_OF_TOKENS, PAIR_OF_LAYERS, FOUR_BY_TWO, PAIR_OF_EXPERTS = TABLE[0], TABLE[4], TABLE[5], TABLE[8]
RESUMED = {"tokens": ("critic",), "layers": ("critic",), "experts": EXPERTS}
"""The runs of each division that one rank resumes."""
TAKEN_OVER = {PAIR_OF_LAYERS: ("shared",), PAIR_OF_EXPERTS: EXPERTS}
"""The runs of one rank that the ranks of an arrangement resume."""
LENGTHS = {
    "everywhere": [5, 1, 19, 2, 33],
    "on borders": [16, 16, 15, 17],
    "one": [61],
    "smallest": [2],
    "alike": [7, 20, 3, 31, 12],
}


def write_families(folder: Path) -> None:
    """Write the models of FAMILIES and EXPERTS into a folder for each division."""
    for what, families in FAMILIES.items():
        for name, values in families.items():
            write_family(name, folder / what, **values)
    for name in EXPERTS:
        build_tokenizer().save_pretrained(save_mixture(folder / "experts" / name, name, vocab_size=VOCABULARY))


def write_family(name: str, folder: Path, **more: Any) -> Path:
    """The model `name`, random, with weights large enough to have opinions; `more` is of its configuration."""
    family, heads = name.split()
    queries, keys = map(int, heads.split("/"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        **SIZES | EXTRAS[family] | more,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        initializer_range=0.25,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder / name


def packed(name: str, ranks: Ranks) -> PackedSequences:
    """The sequences of these lengths; those that are alike begin with the same tokens, which are computed once."""
    sequences = random_sequences(*LENGTHS[name])
    if name == "alike":
        (prefix,) = random_sequences(18)
        sequences = [torch.cat([prefix, each]) for each in sequences] + [torch.cat([prefix, sequences[1][:9]])]
    return PackedSequences.of(sequences, EVERY if name == "alike" else None).divided(ranks.context).to(ranks.device)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, on the CPU."""
    return {name: parameter.grad.full_tensor().cpu() for name, parameter in module.named_parameters()}


def outputs(folder: Path, ranks: Ranks, activations: float, compiled: bool = False) -> dict[str, Any]:
    """Compute passes by the names of LENGTHS, on the CPU: log-probs, entropies, values, log-probs of a reference and
    collisions, all [N], the gradients of weighted sums of them, and the loads of experts."""
    config = ModelConfig(str(folder), activations=activations, compile=compiled)
    policy, critic = (
        load_policy(config, TEMPERATURE, ranks, 64),
        load_critic(CriticConfig(), config, ranks, 64),
    )
    reference = load_reference(config, TEMPERATURE, ranks, 64, on_host=True)
    nn.init.constant_(critic.head.weight, 0.1)
    found: dict[str, Any] = {}
    for name in LENGTHS:
        policy.zero_grad()
        critic.zero_grad()
        batch = packed(name, ranks)
        logprobs, entropy = policy(batch, with_entropy=True)
        loads, values = policy.loads.sums(), critic(batch)
        weights = torch.linspace(-1, 1, len(logprobs), device=ranks.device)
        # Every group has this pass, and FSDP takes the mean over ranks.
        (ranks.context_size * weights * (logprobs + 0.3 * entropy)).sum().backward()
        (ranks.context_size * weights * values**2).sum().backward()
        with torch.no_grad():
            others = reference(batch)[0], policy(batch, with_collisions=True)[1]
        found[name] = [each.detach().cpu() for each in (logprobs, entropy, values, *others)]
        found[name] += [gradients(policy), gradients(critic), {key: each.cpu() for key, each in loads.items()}]
    canary = canary_of(policy, 1, run_settings(TrainConfig()).canary, ranks)
    found["canary"] = canary.logprobs
    return found


def compile_once(folder: Path, ranks: Ranks) -> None:
    """No pass compiles a layer once the first ones have, whether heads are divided or keys are gathered."""
    # Graphs of an earlier arrangement would count against the limit of this one.
    torch._dynamo.reset()
    torch.compiler.set_default_backend("eager")
    policy = load_policy(ModelConfig(str(folder), compile=True), TEMPERATURE, ranks, 96)
    algorithm, trained = Algorithm.from_config(TrainConfig().algorithm, 1), Trainable(policy, 1e-3, LearnerConfig())
    compile_passes(Trainer(ranks, algorithm, trained, None, None, threading.Event()), True, 96, 200)
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([3, 40], [7, 7, 21], [2], [50, 50]):
            sequences = random_sequences(33, *lengths)
            sequences = [torch.cat([sequences[0], each]) for each in sequences]
            for sharing in (None, EVERY):
                batch = PackedSequences.of(sequences, sharing).padded().divided(ranks.context)
                policy(batch.to(ranks.device))[0].sum().backward()
    torch.compiler.set_default_backend("inductor")


def check_slices(ranks: Ranks, together: int) -> None:
    """Slices of even and uneven rows, more ranks than rows, and slices that overlap, are those of the whole matrix, and
    so are gradients: each rank adds its own."""
    torch.manual_seed(0)
    for rows, columns, dim in ((8, 5, 0), (10, 4, 0), (4, 3, 0), (2, 6, 1), (9, 8, 1), (1, 4, 1)):
        length = (rows, columns)[dim]
        size = length // together
        bounds = [(rank * size, (rank + 1) * size) for rank in range(together)]
        if dim == 0 and rows == 4:
            bounds = [(1, 3)] * together
        whole, values = torch.randn(rows, columns), torch.randn(7, size if dim else columns)
        slices = Slices.of(rows, dim, bounds, ranks)
        mine = shard_of(rows, ranks.shard, ranks.shards)
        own = whole[mine.start : mine.stop].clone().requires_grad_()
        wanted = [whole[slice(*each)] if dim == 0 else whole[:, slice(*each)] for each in bounds]
        assert torch.equal(gather_slice(own.detach(), slices), wanted[ranks.rank % together])
        product = sliced_product(values, own, slices)
        torch.testing.assert_close(product, values @ wanted[ranks.rank % together].T)
        ((ranks.rank + 1) * product).sum().backward()
        expected = torch.zeros(rows, columns)
        for rank in range(ranks.size):
            begin, end = bounds[rank % together]
            part = expected.narrow(dim, begin, end - begin)
            part += (rank + 1) * values.sum(0) / ranks.size
        torch.testing.assert_close(own.grad, expected[mine.start : mine.stop])


@contextmanager
def watched() -> Iterator[list[int]]:
    """Record the size of each slice that is gathered in the block."""
    sizes: list[int] = []
    gather = tensor_slices.gather_slice

    def watching(own: Tensor, slices: Slices) -> Tensor:
        found = gather(own, slices)
        sizes.append(found.numel())
        return found

    tensor_slices.gather_slice = watching
    try:
        yield sizes
    finally:
        tensor_slices.gather_slice = gather


def held(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Measure a forward pass: the numbers of matrices that a rank gathers, all together and at most at a time. The
    result also has the numbers of each matrix, and the shapes of the parameters that FSDP gathers of a layer."""
    policy = load_policy(ModelConfig(str(folder)), TEMPERATURE, ranks, 64)
    matrices = [each.numel() for name, each in policy.named_parameters() if ".layers." in name and each.dim() == 2]
    layer, gathered = policy.model.model.layers[0], {}

    def see(module: nn.Module, _: Any) -> None:
        own = {name: each for name, each in module.named_parameters() if not isinstance(each, DTensor)}
        gathered.update({name: tuple(each.shape) for name, each in own.items()})

    layer.register_forward_pre_hook(see)
    with torch.no_grad(), watched() as sizes:
        policy(PackedSequences.of(random_sequences(5, 9)).divided(ranks.context).to(ranks.device))
    return {"all": sum(sizes), "largest": max(sizes), "matrices": matrices, "gathered": gathered}


def compiled(folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """The gradients of a compiled policy. No pass compiles a layer once the first ones have."""
    torch._dynamo.reset()
    torch.compiler.set_default_backend("aot_eager")
    policy = load_policy(ModelConfig(str(folder), compile=True), TEMPERATURE, ranks, 96)
    algorithm, trained = Algorithm.from_config(TrainConfig().algorithm, 1), Trainable(policy, 1e-3, LearnerConfig())
    compile_passes(Trainer(ranks, algorithm, trained, None, None, threading.Event()), True, 96, 200)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = accumulated(policy, ranks)
    torch.compiler.set_default_backend("inductor")
    return found


def accumulated(policy: Policy, ranks: Ranks) -> dict[str, Tensor]:
    """The gradients of passes of several lengths, with shared prefixes and without."""
    for lengths in ([3, 40], [7, 7, 21], [2]):
        sequences = random_sequences(33, *lengths)
        sequences = [torch.cat([sequences[0], each]) for each in sequences]
        for sharing in (None, EVERY):
            batch = PackedSequences.of(sequences, sharing).padded().divided(ranks.context)
            logprobs, _ = policy(batch.to(ranks.device))
            # Every group has this pass, and FSDP takes the mean over ranks.
            (ranks.context_size * torch.linspace(-1, 1, len(logprobs), device=ranks.device) * logprobs).sum().backward()
    return gradients(policy)


def in_bfloat16(folder: Path, ranks: Ranks) -> Tensor:
    """Log-probs [N]."""
    policy = load_policy(ModelConfig(str(folder), dtype="bfloat16"), TEMPERATURE, ranks, 64)
    with torch.no_grad():
        logprobs: Tensor = policy(packed("everywhere", ranks))[0]
    return logprobs.cpu()


def configs(model: Path, folder: Path, mixtures: Path) -> dict[str, TrainConfig]:
    """Runs by name: with shared prefixes, with passes without rows, and with a critic and a reference. Others have
    replayed experts of a mixture, an implicit model, a critic on the policy's backbone, or a frozen layer. Of those
    with the name of a mixture, one has replayed experts, a balance loss and layers that are computed again; another has
    frozen experts."""
    several = {"batch_size": 8, "group_size": 4}
    odd = {"batch_size": 3, "group_size": 3, "steps": 2, "micro_tokens": 32}
    runs = {
        "alike": make_config(model, folder / "alike", **several, steps=3, shared_prefixes=True, minibatches=2),
        "lonely": make_config(model, folder / "lonely", batch_size=1, group_size=1, steps=2),
        "critic": with_critic(make_config(model, folder / "critic", **odd)),
        "replayed": make_config(mixtures / "qwen3_moe", folder / "replayed", **odd, router_replay=True),
        "implicit": prime(model, folder / "implicit", **several, steps=2, micro_tokens=40),
        "shared": with_critic(make_config(model, folder / "shared", **odd)),
        "frozen": with_frozen(make_config(model, folder / "frozen", **odd), "embeddings", "*.layers.0.*"),
    }
    runs["shared"].critic.shared = True
    steps = {"batch_size": 3, "group_size": 3, "steps": 2, "checkpoint_every": 1}
    experts = {name: make_config(mixtures / name, folder / name, **steps) for name in EXPERTS}
    experts["qwen3_moe"].learner.router_replay = True
    experts["qwen3_moe"].model.activations, experts["qwen3_moe"].algorithm.balance_weight = 0.4, 0.5
    experts["glm4_moe"].model.freeze = ["moe_experts"]
    return runs | experts


def trained(model: Path, folder: Path, mixtures: Path, ranks: Ranks, what: str | None = None) -> dict[str, Any]:
    """Train the runs of a division, or all. Returns the weights that they published, their metrics, and the steps, ids
    and rewards of the episodes that they kept."""
    found = {}
    for name, config in configs(model, folder, mixtures).items():
        if what is not None and name not in RUNS[what]:
            continue
        if what == "layers" and name in ("alike", "frozen"):
            config.learner.exchange = "update"
        if what == "layers" and name == "critic":
            config.model.activations = 0.3
        replay = RepeatingReplay(config) if name == "implicit" else PlannedReplay(config, alike=name == "alike")
        run = Run(config, replay).train(ranks)
        kept = [(row.step, row.id, row.reward) for row in KeptEpisodes(run_dir(config.run)).rows()]
        found[name] = {"weights": run.weights, "metrics": run.metrics.rows, "kept": kept}
    return found


def resumed(
    names: Sequence[str], model: Path, folder: Path, own: Path, ranks: Ranks
) -> dict[str, dict[int, dict[str, Tensor]]]:
    """Return the weights of the runs `names` after one more step, from copies in `own` of the checkpoints that one rank
    wrote."""
    if ranks.rank == 0:
        for name in names:
            shutil.copytree(folder / "one" / name, own / name)
    ranks.barrier()
    runs = configs(model, own, folder / "experts")
    return {name: one_step_more(runs[name], ranks) for name in names}


def one_step_more(config: TrainConfig, ranks: Ranks) -> dict[int, dict[str, Tensor]]:
    return Run(replace(config, learner=replace(config.learner, steps=config.learner.steps + 1))).train(ranks).weights


def done_with(each: Arrangement, folder: Path, model: Path, ranks: Ranks) -> dict[str, Any]:
    """Return all that is compared of one arrangement: passes, runs, and the results that only some of them have."""
    models, own = folder / each.what, folder / str(each)
    done: dict[str, Any] = {"passes": {name: outputs(models / name, ranks, 0.3) for name in each.families}}
    if each.what == "tokens" and each.together == 4:
        compile_once(models / "qwen3 4/2", ranks)
        compile_once(models / "llama 6/3", ranks)
    if each.what == "layers":
        check_slices(ranks, each.together)
        if each in (PAIR_OF_LAYERS, FOUR_BY_TWO):
            done["held"] = held(models / "llama 6/2", ranks)
        if each == FOUR_BY_TWO:
            done["compiled"] = compiled(models / "qwen3 4/2", ranks)
        assert stop_one_of_two(model, folder / f"stopped {each}", ranks)
    if each == PAIR_OF_LAYERS:
        done["bfloat16"] = in_bfloat16(models / "qwen3 4/2", ranks)
        done["fine-tuned"] = fine_tuned(model, own, ranks)
    if each in TAKEN_OVER:
        done["resumed"] = resumed(TAKEN_OVER[each], model, folder, folder / f"resumed {each}", ranks)
    done["runs"] = trained(model, own, folder / "experts", ranks, each.what)
    return done


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    with joined() as alone:
        tried = [each for each in TABLE if each.ranks == alone.size]
        done = {str(each): done_with(each, folder, model, each.of(alone)) for each in tried}
        if alone.rank == 0:
            torch.save(done, folder / f"{alone.size}.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
