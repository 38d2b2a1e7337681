"""Computes discounted sums from the last token to the first over packed sequences, without a loop over tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

BLOCK = 8


def linear_scan(decay: Tensor, value: Tensor) -> Tensor:
    """Return x float[M] with x_t = value_t + decay_t x_{t+1} and x_M = 0, without gradient. `decay` and `value` are
    float[M].

    A decay of 0 ends a sequence, so packed sequences of any lengths are scanned together. Blocks of `BLOCK` tokens are
    solved in parallel. A recursive call then computes what each block passes on to the block before it. In all, this is
    O(M) work in BLOCK log_BLOCK(M) vector operations.
    """
    size = value.numel()
    if size == 0:
        return value.clone()
    rows = -(-size // BLOCK)
    spare = rows * BLOCK - size
    # The code below works in place. The caller's tensors are not changed, because pad always copies.
    product = pad(decay.detach(), (0, spare)).view(rows, BLOCK)
    result = pad(value.detach(), (0, spare)).view(rows, BLOCK)
    for column in range(BLOCK - 2, -1, -1):
        result[:, column].addcmul_(product[:, column], result[:, column + 1])
        product[:, column].mul_(product[:, column + 1])
    if rows > 1:
        carry = pad(linear_scan(product[:, 0], result[:, 0])[1:], (0, 1))
        result.addcmul_(product, carry.unsqueeze(1))
    return result.view(-1)[:size]
