"""Run as ranks by test_ranks.py, in one copy or several: trains small runs, and writes down what they published and
measured.

A rank that sends a pickle, or unpickles anything that is more than plain values, fails.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.commands.sft.from_config import fine_tune
from asyncrl.config.changes import ConfigChange
from asyncrl.config.schema import LearnerConfig, LoraConfig, ModelConfig, TrainConfig
from asyncrl.errors import CheckpointError, StoppedError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.gathering import gather, plan_gather
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.rounded_adapters import kept_share
from asyncrl.learner.model.loading import assign_rows, open_model
from asyncrl.learner.model.optimizer import Exchange, Trainable
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.model.sharding import shard
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.adapters import adapter_parameters
from asyncrl.modelling.packed_attention import PACKED
from asyncrl.modelling.weight_format import WeightFormat
from asyncrl.observe.spans import open_spans
from asyncrl.weights.buckets import Bucket, on_host
from asyncrl.weights.manifest import TensorSpec
from tests.helpers import FakeMetrics
from tests.learner.support import (
    Run,
    flip_a_bit,
    make_config,
    make_models,
    save_whole,
    with_critic,
    with_demonstrations,
    with_group_demonstrations,
    write_demonstrations,
)
from tests.mixtures import MIXTURES, mixture

BATCHES = {
    "even": {"batch_size": 8, "group_size": 4, "minibatches": 2, "steps": 3},
    "odd": {"batch_size": 3, "group_size": 3, "steps": 2},
    "lonely": {"batch_size": 1, "group_size": 1, "steps": 2},
    "alike": {"batch_size": 8, "group_size": 4, "steps": 3, "shared_prefixes": True},
}


EXPERTS = ("experts/imbalance", "experts/entropy", "experts/balance_loss")
MEASURED = ("loss", "grad_norm", "lag/mean", *EXPERTS, "routing/replayed", "routing/changed", "routing/refused")
MEMBERS = (
    "demonstration/reward",
    "demonstration/nll",
    "demonstration/tokens",
    "demonstration/advantage",
    "reward/mean",
)

TWO_LAYERS = 8000.0
"""Bytes that one layer of `updated` does not have, and two have, in float32."""

COPIED = ("even", "adapters")
"""The runs that two ranks also train with a copy of the model each."""
CHANGE = ConfigChange(1, "learner.lr", 2e-3, 1e-3, 0)


def configs(model: Path, experts: Path, folder: Path) -> dict[str, TrainConfig]:
    """Runs by name. The shards of some are even, uneven, or empty on one of two ranks. Others have a critic, a mixture
    of experts, demonstrations, frozen parts, adapters, or a model that reads images."""
    runs = {name: make_config(model, folder / name, **values) for name, values in BATCHES.items()}
    return runs | {
        "critic": with_critic(make_config(model, folder / "critic", **BATCHES["odd"], micro_tokens=32)),
        "mixture": make_config(experts, folder / "mixture", **BATCHES["odd"]),
        "replayed": make_config(experts, folder / "replayed", **BATCHES["odd"], router_replay=True),
        "balanced": with_balance(make_config(experts, folder / "balanced", **BATCHES["odd"])),
        "frozen": with_frozen(make_config(model, folder / "frozen", **BATCHES["even"]), "embeddings", "*.layers.0.*"),
        "shown": with_demonstrations(
            make_config(model, folder / "shown", **BATCHES["even"], micro_tokens=48), weight=0.5, share=0.6
        ),
        "members": with_group_demonstrations(
            make_config(model, folder / "members", **{**BATCHES["alike"], "minibatches": 2}, micro_tokens=48)
        ),
        "frozen mixture": with_frozen(make_config(experts, folder / "few", **BATCHES["odd"]), "moe_experts"),
        "images": make_config(model / "vision", folder / "images", **BATCHES["odd"]),
        "frozen tower": with_frozen(make_config(model / "vision", folder / "tower", **BATCHES["odd"]), "vision"),
        "adapters": with_adapters(with_critic(make_config(model, folder / "adapters", **BATCHES["even"]))),
    }


def with_balance(config: TrainConfig) -> TrainConfig:
    config.algorithm.balance_weight, config.algorithm.balance_bias_rate = 0.5, 0.01
    return config


def with_adapters(config: TrainConfig) -> TrainConfig:
    """Ranks that do not divide among ranks, or are fewer than they."""
    config.model.lora, config.critic.lora = LoraConfig(rank=3), LoraConfig(rank=1)
    return config


def with_frozen(config: TrainConfig, *wanted: str) -> TrainConfig:
    config.model.freeze = list(wanted)
    return config


def train_all(
    model: Path, experts: Path, folder: Path, ranks: Ranks, names: Collection[str] = ()
) -> dict[str, tuple[dict, dict]]:
    """Train the runs `names`, or all."""
    results = {}
    for name, config in configs(model, experts, folder).items():
        if names and name not in names:
            continue
        if ranks.size > 1 and name in ("alike", "critic"):
            config.learner.exchange, config.learner.reference_on_host = "update", True
        if name == "shown":
            if ranks.rank == 0:
                write_demonstrations(config, config.algorithm.sft.path, 7)
            ranks.barrier()
        if ranks.size > 1 and name == "even":
            config.learner.optimizer_on_host, config.learner.reshard = True, 0.5
        run = Run(config, changes=[CHANGE], alike=name in ("alike", "members")).train(ranks)
        metrics = {each: run.metrics.of(each) for each in (*MEASURED, *MEMBERS) if run.metrics.of(each)}
        metrics["bins"] = {
            (step, name): value for step, row in run.metrics.rows for name, value in row.items() if "_bin/" in name
        }
        results[name] = (run.weights, metrics)
    return results


def train_copies(model: Path, experts: Path, folder: Path, ranks: Ranks) -> dict[str, tuple[dict, dict]]:
    """Train the runs COPIED with a copy of the model on each rank."""
    shape = (ranks.size, 1)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicas", "shards"))
    return train_all(model, experts, folder / "copies", replace(ranks, mesh=mesh), COPIED)


def fine_tuned(model: Path, folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """The weights that `asyncrl sft` exports after two epochs of 7 demonstrations; the second update of the last step
    of an epoch has one demonstration, so that one of two ranks has none."""
    config = make_config(model, folder / "sft", batch_size=4, minibatches=2, steps=4, keep_best=1, eval_every=2)
    config.data.train, config.data.eval = [str(folder / "train.parquet")], [str(folder / "held.parquet")]
    if ranks.rank == 0:
        write_demonstrations(config, config.data.train, 7)
        write_demonstrations(config, config.data.eval, 5, seed=1)
    ranks.barrier()
    fine_tune(config, ranks, FakeMetrics(), FakeMetrics(), threading.Event())
    ranks.barrier()
    return load_file(folder / "sft" / "run" / "model" / "model.safetensors")


def kept_by_rounding(model: Path, ranks: Ranks) -> list[float | None]:
    """The shares of three changes by adapters, of growing size, that rounding to bfloat16 leaves."""
    config = ModelConfig(str(model), lora=LoraConfig(rank=3), dtype="bfloat16")
    policy, found = load_policy(config, 1.0, ranks, 64), []
    for size in (1e-4, 1e-3, 1e-2):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in adapter_parameters(policy.model).items():
                whole = torch.randn(parameter.shape, generator=generator)
                assign_rows(parameter, whole * size if "lora_B" in name else whole)
        found.append(kept_share(policy.model, torch.bfloat16, ranks))
    return found


def train_with_spans(model: Path, experts: Path, folder: Path, ranks: Ranks) -> dict[int, dict[str, Tensor]]:
    """Train the run "odd" while each rank records spans in the folder of the run. Returns the published weights."""
    config = configs(model, experts, folder / "recorded")["odd"]
    spans = open_spans(config.observe, folder / "recorded", f"learner-{ranks.rank}")
    with closing(spans):
        return Run(config, changes=[CHANGE]).train(ranks, spans).weights


def stop_one_of_two(model: Path, folder: Path, ranks: Ranks) -> bool:
    """Ask rank 1 alone to stop; whether this rank leaves."""
    run = Run(make_config(model, folder / "stopped"))
    if ranks.rank == 1:
        run.stop.set()
    try:
        run.train(ranks)
    except StoppedError:
        return True
    return False


def check_restoring(model: Path, folder: Path, ranks: Ranks) -> None:
    """All ranks follow the choice of rank 0. Rank 1 has a copy of the folder, in which no mark of rank 0 appears."""
    shared, own = folder / "restored", folder / f"restored-{ranks.rank}"
    models, checkpoints = make_models(model, ranks), Checkpoints(own, 2, ranks)
    for step in (2, 4):
        save_whole(Checkpoints(shared, 2, ranks), Progress(step=step), models)
    for step, expected in ((4, 2), (2, None)):
        if ranks.rank == 0:
            flip_a_bit(shared / f"step-{step:06d}")
        ranks.barrier()
        shutil.copytree(shared, own)
        ranks.barrier()
        try:
            assert checkpoints.restore(models) == Progress(step=expected)
        except CheckpointError:
            assert expected is None
        shutil.rmtree(own)


def check_memory(folder: Path, ranks: Ranks) -> None:
    """Loading takes no more memory than the rank's shard and one tensor, here the embedding."""
    folder, embedding = folder / "large", 20_000 * 512 * 4
    if ranks.rank == 0:
        shape = {"vocab_size": 20_000, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6}
        shape |= {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
        Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).save_pretrained(folder)
    ranks.barrier()
    size = (folder / "model.safetensors").stat().st_size
    assert size > 200e6
    # The kernel counts the peak from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    config = ModelConfig(str(folder))
    stored = open_model(config)
    policy = Policy(stored.model, 1.0)
    shard(policy, policy.model, config, ranks)
    stored.read(policy, ranks.device)
    taken = memory("VmHWM") - before
    assert taken < size / ranks.shards + embedding, taken
    assert sum(each.to_local().nbytes for each in policy.parameters()) < (0.01 + 1 / ranks.shards) * size


def memory(name: str) -> int:
    """A figure of this process in bytes: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = (line.split()[1] for line in lines if line.startswith(name))
    return int(found) * 1024


class Odd(nn.Module):
    """Rows that do not divide, fewer rows than ranks, no rows at all, one dimension and three, and a tensor that is not
    sharded."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (7, 5), "b": (1, 3), "c": (13,), "d": (3, 2, 4), "e": (64, 64), "f": (0, 4)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.whole = nn.Parameter(torch.randn(4))


def check_gathered(model: Any, expected: dict[str, Tensor], bucket_bytes: int, ranks: Ranks) -> None:
    """Gather the sharded `model` bucket by bucket: the result is `expected`, on rank 0 alone."""
    weights, got = WeightFormat(model), {}
    largest = max(
        Bucket(tuple(TensorSpec(name, "float32", shape) for name, shape in part.published.items())).nbytes
        for part in weights.parts
    )
    for layer in model.model.layers if hasattr(model, "model") else []:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(model, mesh=ranks.mesh, ignored_params={model.whole} if isinstance(model, Odd) else None)
    for filled in gather(model, plan_gather(weights, torch.bfloat16, bucket_bytes), weights, ranks):
        assert filled.flat.untyped_storage().nbytes() <= max(bucket_bytes, largest)
        got |= on_host(filled)
    assert got.keys() == (expected.keys() if ranks.rank == 0 else set()), got.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name] if "correction_bias" in name else expected[name].bfloat16()), name
    ranks.barrier()


def check_gathering(ranks: Ranks) -> None:
    """Shards of any shape, and stacked experts, come out as `save_pretrained` writes those of the whole model."""
    odd = Odd()
    check_gathered(odd, {name: each.detach().clone() for name, each in odd.named_parameters()}, 256, ranks)
    for family in MIXTURES:
        model = mixture(family)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            # The other ranks write nothing.
            expected = load_file(Path(folder) / "model.safetensors") if ranks.rank == 0 else {}
        check_gathered(model, expected, 4096, ranks)


OPTIMIZERS = ["muon", *(["adamw_8bit"] if find_spec("torchao") else [])]


class Wide(nn.Module):
    """Matrices whose moments adamw_8bit gives 8 bits on one rank and on two, on one rank only, and on none.
    One of two ranks has nothing of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, rows) for rows in (96, 20, 1))


def make_wide(optimizer: str, ranks: Ranks) -> Trainable[Wide]:
    torch.manual_seed(0)
    model = Wide()
    fully_shard(model, mesh=ranks.mesh)
    # Muon computes in bfloat16, which would magnify the rounding of the norm that clipping divides by.
    return Trainable(model, 1e-2, LearnerConfig(optimizer=optimizer, weight_decay=0.1, max_grad_norm=1e9))


def train_wide(model: Trainable[Any], steps: Iterable[int]) -> dict[str, Tensor]:
    """The weights after these steps with random gradients. torchao computes uncompiled, since compiling takes long."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for each in model.module.parameters():
            gradient = torch.randn(each.shape, generator=generator)
            each.grad = distribute_tensor(gradient, each.device_mesh, each.placements)
        with torch.compiler.set_stance("force_eager"):
            model.update(step)
    return {name: each.full_tensor().clone() for name, each in model.module.named_parameters()}


def train_and_resume(optimizer: str, folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """The weights after five steps. A resume after three gives the same bit for bit on as many ranks."""
    trained, resumed = make_wide(optimizer, ranks), make_wide(optimizer, ranks)
    train_wide(trained, range(3))
    save_whole(Checkpoints(folder / optimizer, 2, ranks), Progress(step=3), {"policy": trained})
    restore_wide(resumed, folder / optimizer, ranks)
    expected, weights = train_wide(trained, range(3, 5)), train_wide(resumed, range(3, 5))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    return expected


def restore_wide(model: Trainable[Any], folder: Path, ranks: Ranks) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert Checkpoints(folder, 2, ranks).restore({"policy": model}) == Progress(step=3)


def check_overflow(ranks: Ranks) -> None:
    """A gradient that overflows on the last rank alone moves no weight on any, and lowers the scale on all."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=ranks.mesh)
    trained = Trainable(model, 1e-2, LearnerConfig(), "float16")
    before = [each.to_local().clone() for each in model.parameters()]
    trained.begin_pass(is_last=True)
    factor = float("inf") if ranks.rank == ranks.size - 1 else 1.0
    (trained.loss_factor * factor * model(torch.ones(1, 4)).sum()).backward()
    assert trained.update(0).overflowed
    assert trained.loss_scale is not None
    assert trained.loss_scale.state() == [2.0**15, 0.0]
    assert all(torch.equal(each.to_local(), old) for each, old in zip(model.parameters(), before, strict=True))
    ranks.barrier()


def check_range(ranks: Ranks) -> None:
    """A gradient that float16 can just hold on one rank overflows on no number of them, and they are added up."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=ranks.mesh, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    trained, slope = Trainable(model, 1e-2, LearnerConfig(), "float16"), 0.75
    trained.begin_pass(is_last=True)
    (trained.loss_factor * slope * model(torch.ones(1, 4)).float().sum()).backward()
    update = trained.update(0)
    assert not update.overflowed
    assert update.norm == pytest.approx(slope * ranks.size * 4)


FREQUENCIES = [
    (Exchange(reshard=0.5), 0, True),
    (Exchange(), TWO_LAYERS, True),
    (Exchange(reshard=0.0), 1e9, True),
    (Exchange(once=True), TWO_LAYERS, False),
]
"""The times of exchanges, the bytes of layers that are gathered at once, and true if gradients are added up in the same
order as by default."""


def check_exchanges(ranks: Ranks) -> None:
    """Updates do not depend on the times of exchanges and on the layers that are gathered at once. This also holds for
    frozen layers, in float16, and if each rank has a whole copy of the model."""
    whole = init_device_mesh(ranks.device.type, (ranks.size, 1), mesh_dim_names=("replicas", "shards"))
    kinds = [("float32", 2, ranks), ("float16", 0, ranks), ("float32", 0, replace(ranks, mesh=whole))]
    for dtype, frozen, own in kinds:
        expected = updated(Exchange(), 0, dtype, frozen, own)
        for exchange, unit_bytes, in_order in FREQUENCIES:
            weights = updated(exchange, unit_bytes, dtype, frozen, own)
            for name, tensor in weights.items():
                error = 0.0 if in_order else 1e-6 if dtype == "float32" else 1e-3
                torch.testing.assert_close(tensor, expected[name], atol=error, rtol=error, msg=f"{exchange} {name}")


def updated(exchange: Exchange, unit_bytes: float, dtype: str, frozen: int, ranks: Ranks) -> dict[str, Tensor]:
    """The gradient of two passes, which differ between ranks, and the weights after an update by it, of a model of
    five layers, of which the first ones are frozen."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 5, "head_dim": 16, "vocab_size": 50}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "initializer_range": 0.3}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True))
    model.set_attn_implementation(PACKED)
    for layer in model.model.layers[:frozen]:
        layer.requires_grad_(False)
    policy = Policy(model, 1.0)
    shard(policy, model, ModelConfig("made", dtype=dtype), ranks, unit_bytes=unit_bytes)
    trained = Trainable(policy, 1e-2, LearnerConfig(max_grad_norm=1e9, betas=[0.9, 0.9]), dtype)
    trained.fitted = exchange
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * number + ranks.rank)
        sequences = [torch.randint(50, (length,), generator=generator) for length in (7, 4)]
        trained.begin_pass(is_last=number == 1)
        # Small enough for gradients that float16 can hold.
        (trained.loss_factor / 256 * policy(PackedSequences.of(sequences))[0].mean()).backward()
    moved = {name: each for name, each in policy.named_parameters() if each.grad is not None}
    gradients = {f"of {name}": each.grad.full_tensor().clone() for name, each in moved.items()}
    assert len(gradients) == sum(each.requires_grad for each in policy.parameters())
    assert trained.update(0).is_applied
    with torch.no_grad():
        policy(PackedSequences.of(sequences))
    assert all(isinstance(each, DTensor) for each in policy.parameters())
    return gradients | {name: each.full_tensor() for name, each in policy.named_parameters()}


def refuse_pickles() -> None:
    """Fail where torch pickles for other ranks, and where anything is looked up by name in a pickle."""

    def refuse(*_: object) -> None:
        raise AssertionError("a rank sends a pickle")

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            raise AssertionError(f"a rank unpickles {arguments}")

    distributed_c10d._object_to_tensor = refuse
    sys.addaudithook(watch)


def main(model: Path, experts: Path, folder: Path, replicas: int, names: Collection[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    refuse_pickles()
    with joined(replicas) as ranks:
        results = train_all(model, experts, folder, ranks, names)
        copies = train_copies(model, experts, folder, ranks) if replicas == 1 else {}
        recorded = train_with_spans(model, experts, folder, ranks)
        stopped = stop_one_of_two(model, folder, ranks)
        imitated = fine_tuned(model, folder, ranks)
        check_gathering(ranks)
        check_overflow(ranks)
        check_range(ranks)
        if replicas == 1:
            check_exchanges(ranks)
        check_restoring(model, folder, ranks)
        check_memory(folder, ranks)
        done = {
            "results": results,
            "copies": copies,
            "sft": imitated,
            "recorded": recorded,
            "stopped": stopped,
            "kept": kept_by_rounding(model, ranks),
            "size": ranks.size,
            "gathered": ["odd shapes", *MIXTURES],
            "exchanged": len(FREQUENCIES) if replicas == 1 else 0,
        }
        done["optimizers"] = {each: train_and_resume(each, folder, ranks) for each in OPTIMIZERS}
        if ranks.rank == 0:
            torch.save(done, folder / "results.pt")
        within = threads()
    del ranks
    assert threads() < within, "gloo's threads end with the ranks"


def threads() -> int:
    """Count the threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]), sys.argv[5:])
