"""The vocabulary head and its cross entropy in one, a few rows at a time.

Shapes: N targets, D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from wherelm.model.dtypes import for_products
from wherelm.schemes.base import wide

CHUNK = 2**21  # logits that exist at once, but for huge V: they stay in a processor's cache
MULTIPLE = 64  # of rows in a chunk: few shapes, for each of which kernels are compiled


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits kept within ±softcap (Gemma 2, 2024), so that no step can make them run away."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def head_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float | None = None
) -> Tensor:
    """Sum of -log p(target) in nats, p = softmax(capped(x W^T)), at least in float32.

    The same as cross entropy over all N × V logits, which are never held at once: gradients are
    taken chunk by chunk together with the loss, as in "Liger Kernel" (Hsu et al., 2024).
    """
    return _HeadCrossEntropy.apply(x_ND, weight_VD, targets_N, softcap)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_VD, targets_N, softcap):
        learns = any(ctx.needs_input_grad)
        loss = wide(x_ND.new_zeros(()))
        x_grad_ND = torch.empty_like(x_ND) if learns else None
        weight_grad_VD = torch.zeros_like(weight_VD) if learns else None
        count = len(x_ND)
        x_ND, weight_VD = for_products(x_ND), for_products(weight_VD)
        # Filled up with rows that do not count.
        x_ND = F.pad(x_ND, (0, 0, 0, -count % MULTIPLE))
        targets_N = F.pad(targets_N, (0, -count % MULTIPLE))
        # Each chunk passes over all of the V × D gradient, which below D rows would be most of it.
        rows = max(x_ND.shape[1], CHUNK // len(weight_VD))
        rows += -rows % MULTIPLE
        for start in range(0, len(x_ND), rows):
            chunk = slice(start, start + rows)
            x_CD, targets_C1 = x_ND[chunk], targets_N[chunk, None]
            logits_CV = x_CD @ weight_VD.T
            logits_CV = capped(wide(logits_CV), softcap)
            slope_CV = None if softcap is None else 1 - (logits_CV / softcap) ** 2
            # In place, for a chunk in the cache is worth more than a softmax in one pass.
            logits_CV -= logits_CV.amax(-1, keepdim=True)
            target_C1 = logits_CV.gather(1, targets_C1)
            sum_C1 = logits_CV.exp_().sum(-1, keepdim=True)
            loss += (sum_C1.log() - target_C1)[: count - start].sum()
            if not learns:
                continue
            # d loss / d logits = p - one-hot(target)
            grad_CV = logits_CV.div_(sum_C1)
            grad_CV.scatter_add_(1, targets_C1, torch.full_like(target_C1, -1.0))
            if slope_CV is not None:
                grad_CV *= slope_CV
            grad_CV = grad_CV.to(weight_VD.dtype)
            grad_CV[count - start :] = 0
            x_grad_ND[chunk] = (grad_CV @ weight_VD)[: count - start]
            weight_grad_VD += grad_CV.T @ x_CD
        ctx.save_for_backward(x_grad_ND, weight_grad_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x_grad_ND, weight_grad_VD = ctx.saved_tensors
        return x_grad_ND * grad, weight_grad_VD * grad, None, None
