"""Run as ranks by test_context.py: tiny models compute passes whose tokens several ranks divide, and whole runs are
trained so. What came of it is written down."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.config.schema import CriticConfig, LearnerConfig, ModelConfig, TrainConfig
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.compiling import compile_passes
from asyncrl.learner.model.canary import canary_of
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy, load_reference
from asyncrl.learner.ranks.ranks import Ranks, context_group, joined
from asyncrl.learner.trainer import Trainer
from tests.learner.model.test_models_beside_the_policy import RepeatingReplay, prime
from tests.learner.support import VOCABULARY, PlannedReplay, Run, make_config, random_sequences, with_critic

TEMPERATURE = 0.7
MIXTURE = "mixture"
SIZES = {"hidden_size": 48, "intermediate_size": 24, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
EXTRAS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "gemma2": {"sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
}
FAMILIES = ("qwen3 4/2", "llama 6/3", "gemma2 4/2", "gemma2 3/1", "gpt_oss 4/1", "gpt_oss 3/3")
"""Models by family, heads and heads of keys."""
ARRANGEMENTS = {
    2: [(2, 1, ("qwen3 4/2", "llama 6/3", "gemma2 3/1", "gpt_oss 4/1"))],
    4: [(4, 1, ("llama 6/3", "gpt_oss 4/1")), (2, 1, ("gemma2 4/2", "gpt_oss 3/3")), (2, 2, ("qwen3 4/2",))],
}
"""By ranks: how many divide passes together, how many copies there are, and of which models passes are tried."""
LENGTHS = {
    "everywhere": [5, 1, 19, 2, 33],
    "on borders": [16, 16, 15, 17],
    "one": [61],
    "smallest": [2],
    "alike": [7, 20, 3, 31, 12],
}


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
    """On the CPU."""
    return {name: parameter.grad.full_tensor().cpu() for name, parameter in module.named_parameters()}


def outputs(folder: Path, ranks: Ranks, activations: float, compiled: bool = False) -> dict[str, Any]:
    """By lengths: log-probs, entropies, collisions, the log-probs of a reference, and values, all [N], and the
    gradients of weighted sums of them, and the loads of experts, all on the CPU."""
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
    canary = canary_of(policy, 1, TrainConfig(), ranks)
    found["canary"] = canary.logprobs
    return found


def compile_once(folder: Path, ranks: Ranks) -> None:
    """No pass compiles a layer once the first ones have, whether heads are divided or keys are gathered."""
    torch.compiler.set_default_backend("eager")
    policy = load_policy(ModelConfig(str(folder), compile=True), TEMPERATURE, ranks, 96)
    algorithm, trained = Algorithm.from_config(TrainConfig().algorithm, 1), Trainable(policy, 1e-3, LearnerConfig())
    compile_passes(Trainer(ranks, algorithm, trained, None, None, threading.Event()), share_prefixes=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([3, 40], [7, 7, 21], [2], [50, 50]):
            sequences = random_sequences(33, *lengths)
            sequences = [torch.cat([sequences[0], each]) for each in sequences]
            for sharing in (None, EVERY):
                batch = PackedSequences.of(sequences, sharing).padded().divided(ranks.context)
                policy(batch.to(ranks.device))[0].sum().backward()
    torch.compiler.set_default_backend("inductor")


def arranged(ranks: Ranks, together: int, replicas: int) -> Ranks:
    """The same ranks, of which so many `together` divide passes, with so many copies of a model."""
    group = context_group(ranks.rank, ranks.size, together, timedelta(seconds=60))
    shape = (replicas, ranks.size // replicas)
    mesh = (
        init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicas", "shards"))
        if replicas > 1
        else ranks.mesh
    )
    return replace(ranks, context=group, mesh=mesh)


def configs(model: Path, folder: Path) -> dict[str, TrainConfig]:
    """Runs with shared prefixes, with passes without rows, with a critic and a reference, with an implicit model,
    and of a mixture with replayed experts."""
    several = {"batch_size": 8, "group_size": 4}
    odd = {"batch_size": 3, "group_size": 3, "steps": 2, "micro_tokens": 32}
    return {
        "alike": make_config(model, folder / "alike", **several, steps=3, shared_prefixes=True, minibatches=2),
        "lonely": make_config(model, folder / "lonely", batch_size=1, group_size=1, steps=2),
        "critic": with_critic(make_config(model, folder / "critic", **odd)),
        "replayed": make_config(folder.parent / MIXTURE, folder / "replayed", **odd, router_replay=True),
        "implicit": prime(model, folder / "implicit", **several, steps=2, micro_tokens=40),
    }


def trained(model: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """What the runs published and measured."""
    found = {}
    for name, config in configs(model, folder).items():
        replay = RepeatingReplay(config) if name == "implicit" else PlannedReplay(config, alike=name == "alike")
        run = Run(config, replay).train(ranks)
        found[name] = {"weights": run.weights, "metrics": run.metrics.rows}
    return found


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    with joined() as alone:
        done: dict[str, Any] = {}
        for name in ARRANGEMENTS[alone.size]:
            ranks = arranged(alone, *name[:2])
            for family in name[2]:
                done[(*name[:2], family)] = outputs(folder / family, ranks, 0.3)
            if name[:2] == (4, 1):
                compile_once(folder / "qwen3 4/2", ranks)
                compile_once(folder / "llama 6/3", ranks)
            done[name[:2]] = trained(model, folder / f"{alone.size} ranks, {name[:2]}", ranks)
        if alone.rank == 0:
            torch.save(done, folder / f"{alone.size}.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
