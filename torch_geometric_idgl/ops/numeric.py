"""Divisions and logarithms that stay finite, unit vectors, quick products, blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    'are_largest',
    'block_entries',
    'different_rows',
    'dropout',
    'gram',
    'reads_are_free',
    'refuse_second_derivatives',
    'relu_dropout',
    'safe_log',
    'safe_reciprocal',
    'safe_rsqrt',
    'symmetric_product',
    'weighted_unit_vectors',
    'widen',
]

_NARROW = 16
_STEPS = 1 << 16  # of the probabilities of `dropout`
_BLOCK = 1 << 20  # entries of a block that stays in a CPU's cache while it is used
TINY = 1e-12  # the released code clamps sums here before dividing and in logs


def refuse_second_derivatives() -> None:
    """Raises; for a backward function that finds gradients enabled. The decorator of
    PyTorch for this lets :meth:`torch.autograd.grad` pass, whose result is then wrong.
    """
    raise RuntimeError(
        'Expected first derivatives alone (got create_graph=True): learned graphs have '
        'no second ones'
    )


def reads_are_free(device: torch.device) -> bool:
    """Whether Python may look at numbers without waiting for the device."""
    return device.type == 'cpu'


def block_entries(device: torch.device) -> int:
    """How many entries of a large matrix to hold at a time: what fits a CPU's cache, or
    a 64th of a GPU's memory.
    """
    if device.type != 'cuda':
        return _BLOCK
    return max(_BLOCK, torch.cuda.get_device_properties(device).total_memory >> 8)


def safe_reciprocal(x: Tensor) -> Tensor:
    r""":math:`1 / x` where :math:`x` is positive, zero with zero gradient elsewhere.

    A row that sparsification has emptied has degree zero; its normalised row is zero,
    not NaN.
    """
    tiny = max(TINY, torch.finfo(x.dtype).tiny)  # half precision has larger ones
    return x.masked_fill(x <= tiny, torch.inf).reciprocal()


def safe_rsqrt(x: Tensor) -> Tensor:
    r""":math:`x^{-1/2}` where :math:`x` is positive, zero with zero gradient
    elsewhere.
    """
    tiny = max(TINY**2, torch.finfo(x.dtype).tiny)
    return x.masked_fill(x <= tiny, torch.inf).rsqrt()


def safe_log(x: Tensor) -> Tensor:
    r""":math:`\log(\max(x, 10^{-12}))`, with zero gradient where it is clamped."""
    return x.clamp(min=max(TINY, torch.finfo(x.dtype).tiny)).log()


def are_largest(x: Tensor, k: int) -> Tensor:
    """Which entries are the :obj:`k` largest of their row, of equal ones the first
    (:meth:`torch.topk` does not say which it returns).
    """
    least = x.topk(k, dim=-1).values[..., -1:]
    larger, equal = x > least, x == least
    left = k - larger.sum(-1, keepdim=True)
    return larger | (equal & (equal.cumsum(-1, dtype=torch.int) <= left))


@torch.no_grad()
def different_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The places of different rows of a matrix, and which of them each row is equal to.
    Rows are told apart by a weighted sum of their entries; should that not do, all are
    taken to be different.
    """
    generator = torch.Generator().manual_seed(0)  # the caller's is left alone
    weight = torch.randn(x.size(1), generator=generator, dtype=torch.double)
    _, kind = torch.unique(x.double() @ weight.to(x.device), return_inverse=True)
    place = torch.arange(x.size(0), device=x.device)
    first = place.new_zeros(int(kind.max()) + 1).scatter_(0, kind, place)
    return (first, kind) if torch.equal(x[first][kind], x) else (place, place)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    r"""The dropout of :func:`torch.nn.functional.dropout`, several times faster on
    CPUs: one random number of 64 bits decides about four entries, so :math:`p` is
    rounded to a multiple of :math:`2^{-16}` (and the scale follows it). An epoch on
    Cora takes 1.04 times as long without.
    """
    drawn = _draw_dropped(x, p) if training else None
    if drawn is None:
        return F.dropout(x, p, training)
    dropped, scale = drawn
    return x * dropped.logical_not_().to(x.dtype).mul_(scale)


def relu_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """The :func:`dropout` of rectified values. Where the result is zero, so is the
    gradient: no mask has to be kept, which is a third of the memory of a layer.
    """
    drawn = _draw_dropped(x, p) if training else None
    if drawn is None:
        return F.dropout(x.relu(), p, training)
    return _ReluDropout.apply(x, *drawn)


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, scale):
        ctx.scale = scale
        out = x.relu().masked_fill_(dropped, 0.0).mul_(scale)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        (out,) = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grad, out, 0.0).mul_(ctx.scale)
        return grad, None, None


def _draw_dropped(x: Tensor, p: float) -> tuple[Tensor, float] | None:
    """Which entries to drop, and the scale of the others; nothing where PyTorch's own
    dropout is as quick.
    """
    share = round(p * _STEPS)
    quick = 0 < share < _STEPS and x.device.type == 'cpu'
    if not quick or torch.compiler.is_compiling():
        return None
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.long).random_(-(2**63), None)
    dropped = bits.view(torch.short)[: x.numel()] < share - _STEPS // 2
    return dropped.view(x.shape), _STEPS / (_STEPS - share)


def widen(x: Tensor) -> Tensor:
    """Pad a few columns with zeros, to 16 or 32.

    CPU libraries multiply a large matrix with 2 to 15 columns several times slower than
    with 16, most of all the transposed one, which every backward pass needs; and with
    17 slower than with 32. An epoch on Cora takes 1.2 times as long without.
    """
    width = x.size(1)
    missing = -width % _NARROW if 1 < width < 2 * _NARROW else 0
    return F.pad(x, (0, missing)) if missing else x


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    r""":math:`\mathbf{A}^{\top} \mathbf{B}` of each pair of a batch, known to be
    symmetric: only one half is multiplied, in strips.
    """
    size = b.size(2)
    out = b.new_empty(b.size(0), size, size)
    step = max(256, -(-size // 4))
    for start in range(0, size, step):
        strip, rest = slice(start, start + step), slice(start + step, None)
        left, right = a[:, :, strip].transpose(1, 2), b[:, :, start:]
        # A plain product is faster than a batched one.
        out[:, strip, start:] = left[0] @ right[0] if len(a) == 1 else left @ right
        out[:, rest, strip] = out[:, strip, rest].transpose(1, 2)
    return out


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return u @ u.transpose(-1, -2)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        (u,) = ctx.saved_tensors
        return (grad + grad.transpose(-1, -2)) @ u


def gram(u: Tensor) -> Tensor:
    r""":math:`\mathbf{U} \mathbf{U}^{\top}`, or that of each matrix of a batch. Its
    gradient :math:`(\mathbf{G} + \mathbf{G}^{\top}) \mathbf{U}` takes one product,
    where autograd takes two, which short documents notice most.
    """
    return _Gram.apply(u)


class _WeightedUnitVectors(torch.autograd.Function):
    """In closed form: autograd would keep and walk over several n x m x d products. Row
    blocks stay in the cache; of a million nodes, whole matrices would each be paged in.
    """

    @staticmethod
    def forward(ctx, x, weight):
        heads, channels = weight.shape
        sq_weight = weight.square().t() * heads
        out = x.new_empty(x.size(0), heads, channels)
        scale = x.new_empty(x.size(0), heads)
        step = max(1, block_entries(x.device) // max(1, weight.numel()))
        for start in range(0, x.size(0), step):
            rows = slice(start, start + step)
            own = x[rows]
            scale[rows] = safe_rsqrt(own.square() @ sq_weight)
            torch.mul(scale[rows].unsqueeze(-1), weight, out=out[rows])
            out[rows] *= own.unsqueeze(1)
        ctx.save_for_backward(x, weight, scale)
        return out.flatten(1)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            refuse_second_derivatives()
        x, weight, scale = ctx.saved_tensors
        heads, channels = weight.shape
        grad = grad.view(-1, heads, channels)
        sq_weight = weight.square()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight)
        step = max(1, block_entries(x.device) // max(1, weight.numel()))
        for start in range(0, x.size(0), step):
            rows = slice(start, start + step)
            own = x[rows]
            scaled = grad[rows] * scale[rows].unsqueeze(-1)  # g r
            moment = scaled * own.unsqueeze(1)  # g r x
            grad_weight += moment.sum(0)
            # r = q^{-1/2} with q = m sum_k w_k^2 x_k^2: dq = -r^2 (sum_k g r w x) / 2.
            grad_q = moment.mul_(weight).sum(2) * scale[rows].square() * -heads
            grad_weight.addcmul_(weight, grad_q.t() @ own.square())
            if grad_x is not None:
                part = scaled.mul_(weight).sum(1)
                torch.addcmul(part, own, grad_q @ sq_weight, out=grad_x[rows])
        return grad_x, grad_weight


def weighted_unit_vectors(x: Tensor, weight: Tensor) -> Tensor:
    r"""Concatenate :math:`(\mathbf{w}_p \odot \mathbf{x}_i) / (\sqrt{m} \,
    \|\mathbf{w}_p \odot \mathbf{x}_i\|)` over the heads :math:`p`.

    The inner product of two such vectors is the mean of the :math:`m` weighted cosines.
    Zero vectors stay zero, and get no gradient.

    Args:
        x (torch.Tensor): Vectors, of shape :obj:`[n, d]`.
        weight (torch.Tensor): The weights of the heads, of shape :obj:`[m, d]`.
    """
    return _WeightedUnitVectors.apply(x, weight)
