from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model import states_on_host
from asyncrl.learner.model.optimizer import Trainable, lr_scale
from asyncrl.learner.model.states_on_host import step_with_states_on_host

CONFIG = LearnerConfig(
    steps=10, warmup_steps=2, lr_floor=0.1, betas=[0.8, 0.9], weight_decay=0.5, max_grad_norm=2.0, schedule="cosine"
)
STEPS = (0, 1, 5)


class Decoder(nn.Module):
    """A model with one parameter of each kind. Its gradients are those of `loss`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(6, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"wide": nn.Linear(8, 12), "norm": nn.LayerNorm(8)})])
        self.register_parameter("experts_bias", nn.Parameter(torch.randn(3, 4)))
        self.lm_head = nn.Linear(8, 6, bias=False)

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return sum((torch.randn(each.shape, generator=generator) * each).sum() for each in self.parameters())


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def trained(config: LearnerConfig, steps: tuple[int, ...] = STEPS) -> dict[str, Tensor]:
    """The weights after an update at each of the steps."""
    model = Decoder()
    trainable = Trainable(model, 1e-2, config)
    for step in steps:
        model.loss(step).backward()
        trainable.update(step)
    return weights(model)


def plainly_trained(optimizers: Callable[[Decoder], list[torch.optim.Optimizer]]) -> dict[str, Tensor]:
    """The same by a plain loop, at the learning rates of CONFIG."""
    model = Decoder()
    each = optimizers(model)
    for step, lr in zip(STEPS, (5e-3, 1e-2, 1e-2 * 0.722208), strict=True):
        model.loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        for optimizer in each:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


DECAYED = {"embed_tokens.weight", "layers.0.wide.weight", "lm_head.weight"}


def adamw(model: nn.Module, without: tuple[str, ...] = ()) -> torch.optim.AdamW:
    named = [(name, each) for name, each in model.named_parameters() if name not in without]
    groups = [{"params": [each for name, each in named if name in DECAYED], "weight_decay": 0.5}]
    groups += [{"params": [each for name, each in named if name not in DECAYED], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.8, 0.9))


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=1e-6, rtol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_adamw_is_that_of_a_plain_loop_and_norms_and_biases_have_no_weight_decay(optimizer: str):
    """Matrices as small as these keep moments of 32 bits. tests/learner/ranks/test_ranks.py has larger ones."""
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao", exc_type=ImportError)
    with torch.compiler.set_stance("force_eager"):
        assert_close(trained(replace(CONFIG, optimizer=optimizer)), plainly_trained(lambda model: [adamw(model)]))


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_an_optimizer_whose_package_is_missing_names_the_extra():
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[adamw-8bit\]'"):
        Trainable(Decoder(), 1e-2, replace(CONFIG, optimizer="adamw_8bit"))


def test_the_bytes_of_moments_are_known_before_there_are_any():
    for optimizer in ("adamw", "muon"):
        model = Decoder()
        trainable = Trainable(model, 1e-2, replace(CONFIG, optimizer=optimizer))
        expected = trainable.moment_bytes()
        model.loss(0).backward()
        trainable.update(0)
        moments = [each for state in trainable.moments().values() for each in state.values() if each.dim()]
        assert sum(each.nbytes for each in moments) == expected


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest():
    inner = "layers.0.wide.weight"

    def optimizers(model: Decoder) -> list[torch.optim.Optimizer]:
        muon = torch.optim.Muon(
            [model.layers[0]["wide"].weight], weight_decay=0.5, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, adamw(model, without=(inner,))]

    assert_close(trained(replace(CONFIG, optimizer="muon", momentum=0.9)), plainly_trained(optimizers))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_on_the_host_give_the_same_bits(optimizer: str):
    expected = trained(replace(CONFIG, optimizer=optimizer))
    got = trained(replace(CONFIG, optimizer=optimizer, optimizer_on_host=True))
    assert all(torch.equal(got[name], each) for name, each in expected.items())


def test_a_part_of_the_states_is_on_the_device_at_a_time_and_they_keep_their_memory_on_the_host():
    class Watched(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            given = [each for group in self.param_groups for each in group["params"]]
            numbers.append(sum(each.numel() for each in given))
            device.update(self.state[each]["exp_avg"].data_ptr() for each in given if each in self.state)
            super().step(closure)

    def memory() -> list[int]:
        return [optimizer.state[each]["exp_avg"].data_ptr() for each in model.parameters()]

    numbers: list[int] = []
    hosts: list[list[int]] = []
    device: set[int] = set()
    model = Decoder()
    optimizer = Watched(model.parameters(), fused=True)
    for step in STEPS:
        model.loss(step).backward()
        step_with_states_on_host(optimizer, part=60)
        hosts.append(memory())
    sizes = [each.numel() for each in model.parameters()]
    assert sizes == [12, 48, 96, 12, 8, 8, 48]
    assert numbers == 3 * [60, 96, 28, 48]
    assert len(device) > 0
    assert hosts == 3 * [hosts[0]]
    assert device.isdisjoint(hosts[0])


def test_memory_for_states_is_allocated_only_for_the_first_step(monkeypatch: pytest.MonkeyPatch):
    allocated: list[torch.Size] = []

    def allocate(value: torch.Tensor) -> torch.Tensor:
        allocated.append(value.shape)
        return torch.empty_like(value)

    monkeypatch.setattr(states_on_host, "_host_memory", allocate)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in STEPS:
        model.loss(step).backward()
        step_with_states_on_host(optimizer)
    assert len(allocated) == 2 * len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.8875, 0.55, 0.2125, 0.1]),
        ("cosine", [0.5, 1, 1, 0.965746, 0.55, 0.134254, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_falls_to_its_floor(name: str, expected: list[float]):
    config = replace(CONFIG, schedule=name, lr_floor=0.0 if name == "constant" else 0.1)
    assert [lr_scale(config, step) for step in (0, 1, 2, 3, 6, 9, 20)] == pytest.approx(expected, abs=1e-6)


def test_a_warm_up_below_one_is_a_share_of_all_steps():
    config = replace(CONFIG, warmup_steps=0.5, schedule="constant", steps=8)
    assert [lr_scale(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_falling_rate_reaches_its_floor_after_the_last_step(name: str) -> None:
    config = replace(CONFIG, schedule=name)
    last, after = (lr_scale(config, step) for step in (config.total_steps - 1, config.total_steps))
    assert after == pytest.approx(config.lr_floor)
    assert last > config.lr_floor


def test_a_changed_schedule_holds_from_the_next_update_on():
    trainable = Trainable(Decoder(), 1e-2, replace(CONFIG, schedule="linear", lr_floor=0.0))
    assert trainable.learning_rate(6) == pytest.approx(5e-3)
    trainable.configure(2e-2, replace(CONFIG, schedule="linear", lr_floor=0.0, steps=18))
    assert trainable.learning_rate(6) == pytest.approx(1.5e-2)


def test_a_gradient_far_above_the_usual_norms_changes_nothing_until_such_norms_are_usual():
    model = Decoder()
    trainable, applied = Trainable(model, 1e-2, replace(CONFIG, skip_grad_norm_factor=5.0)), []
    for step, size in enumerate([1, *[1e-3] * 8, 1e-3, 1e-2, 4e-3, *[1] * 14]):
        before = weights(model)
        (model.loss(0) * size).backward()
        update = trainable.update(step)
        applied.append(not torch.equal(before["lm_head.weight"], model.lm_head.weight))
        assert update.too_large != applied[-1]
    assert applied == [True] * 10 + [False, True] + [False] * 10 + [True] * 4


def test_a_gradient_above_the_limit_changes_nothing_and_is_told():
    model = Decoder()
    before, trainable = weights(model), Trainable(model, 1e-2, replace(CONFIG, skip_grad_norm=1.0))
    model.loss(0).backward()
    update = trainable.update(0)
    assert update.too_large
    assert update.norm > 1
    assert not trainable.moments()
    assert all(torch.equal(before[name], each) for name, each in model.named_parameters())
    assert all(each.grad is None for each in model.parameters())
    (model.loss(0) * 1e-3).backward()
    assert not trainable.update(1).too_large
    assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)


def test_a_scale_multiplies_the_learning_rate_of_one_update():
    """The first update of AdamW moves each weight by the learning rate, in the direction of the gradient's sign."""
    moves = []
    for scale in (1.0, 0.25):
        model = Decoder()
        before = weights(model)
        trainable = Trainable(model, 1e-2, CONFIG)
        model.loss(2).backward()
        trainable.update(2, scale)
        moves.append({name: each - before[name] for name, each in weights(model).items()})
    for name, whole in moves[0].items():
        torch.testing.assert_close(moves[1][name], 0.25 * whole, atol=1e-7, rtol=1e-3)
