r"""Similarity metrics (Eq. 1 and 2).

A metric is two steps: :meth:`Metric.embed` gives every node a vector once, and
:meth:`Metric.pair` compares any two sets of vectors. That is what lets a graph be
computed in blocks, for all pairs of nodes or for nodes and anchors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..checks import check_at_least
from ..ops.numeric import safe_rsqrt, weighted_unit_vectors
from ..ops.sparse import SparseMatrix

__all__ = [
    'RBF',
    'ROWWISE',
    'Attention',
    'Cosine',
    'CustomMetric',
    'Metric',
    'WeightedCosine',
    'resolve_metric',
]


class Metric(Module):
    r"""The base class of similarity metrics.

    A metric whose :meth:`pair` is the inner product of embeddings should set
    :attr:`inner_product`, so that graphs can be kept in factored form.
    """

    inner_product: bool = False
    symmetric: bool = True

    def embed(self, x: Tensor | SparseMatrix) -> Tensor:
        """A vector for each node: :obj:`[n, d]` to :obj:`[n, K]`."""
        raise NotImplementedError

    def pair(self, u: Tensor, v: Tensor) -> Tensor:
        """Similarities of two sets of vectors: :obj:`[n, K]` and :obj:`[s, K]` to
        :obj:`[n, s]`.
        """
        return u @ v.t()

    def nonnegative(self, inputs_nonnegative: bool) -> bool:
        """Whether no similarity is negative, given the sign of the inputs."""
        return False

    def forward(self, x: Tensor, anchors: Tensor | None = None) -> Tensor:
        """The similarities of all pairs, or of nodes and anchors.

        Args:
            x (torch.Tensor): Features or embeddings of the nodes.
            anchors (torch.Tensor, optional): Those of the anchors.
                (default: :obj:`None`)
        """
        u = self.embed(x)
        return self.pair(u, u if anchors is None else self.embed(anchors))

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""


class WeightedCosine(Metric):
    r"""The multi-head weighted cosine similarity (Eq. 1 and 2).

    .. math::
        s_{ij} = \frac{1}{m} \sum_{p=1}^{m} \cos(\mathbf{w}_p \odot \mathbf{v}_i,
        \mathbf{w}_p \odot \mathbf{v}_j)

    The :math:`m` heads are one inner product of concatenated, normalised vectors. The
    cosine with a zero vector is zero.

    Args:
        in_channels (int): Size of each input sample.
        heads (int, optional): Number of heads :math:`m`. (default: :obj:`4`)
    """

    inner_product = True

    def __init__(self, in_channels: int, heads: int = 4) -> None:
        super().__init__()
        check_at_least('in_channels', in_channels, 1, integer=True)
        check_at_least('heads', heads, 1, integer=True)
        self.in_channels = in_channels
        self.heads = heads
        self.weight = Parameter(torch.empty(heads, in_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.xavier_uniform_(self.weight)

    def embed(self, x: Tensor | SparseMatrix) -> Tensor:
        return weighted_unit_vectors(x.to_dense(), self.weight)  # [n, m * d]

    def nonnegative(self, inputs_nonnegative: bool) -> bool:
        return inputs_nonnegative

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({self.in_channels}, heads={self.heads})'


class Cosine(Metric):
    r"""The plain cosine similarity, without parameters.

    .. math::
        s_{ij} = \cos(\mathbf{v}_i, \mathbf{v}_j)

    Args:
        in_channels (int, optional): Not needed. (default: :obj:`None`)
    """

    inner_product = True

    def __init__(self, in_channels: int | None = None) -> None:
        super().__init__()

    def embed(self, x: Tensor | SparseMatrix) -> Tensor:
        x = x.to_dense()
        if x.numel():  # Cosines do not change, and squares do not overflow.
            x = x / x.detach().abs().amax(dim=1, keepdim=True).clamp(min=1.0)
        return x * safe_rsqrt(x.square().sum(1, keepdim=True))

    def nonnegative(self, inputs_nonnegative: bool) -> bool:
        return inputs_nonnegative

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}()'


class RBF(Metric):
    r"""The radial basis function kernel of learned projections.

    .. math::
        s_{ij} = \exp \Big( - \frac{\|\mathbf{P} \mathbf{v}_i - \mathbf{P}
        \mathbf{v}_j\|^2}{2 \sigma^2} \Big)

    Args:
        in_channels (int): Size of each input sample.
        out_channels (int, optional): Size of the projections. (default: :obj:`16`)
        bandwidth (float, optional): The initial bandwidth :math:`\sigma`, learned.
            (default: :obj:`1.`)
    """

    def __init__(
        self, in_channels: int, out_channels: int = 16, bandwidth: float = 1.0
    ) -> None:
        super().__init__()
        check_at_least('in_channels', in_channels, 1, integer=True)
        check_at_least('out_channels', out_channels, 1, integer=True)
        check_at_least('bandwidth', bandwidth, 0)
        if bandwidth == 0:
            raise ValueError(f"Expected 'bandwidth' to be positive (got {bandwidth})")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.initial_bandwidth = bandwidth
        self.weight = Parameter(torch.empty(in_channels, out_channels))
        self.log_bandwidth = Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.xavier_uniform_(self.weight)
        torch.nn.init.constant_(self.log_bandwidth, math.log(self.initial_bandwidth))

    def embed(self, x: Tensor | SparseMatrix) -> Tensor:
        return x.matmul(self.weight) * torch.exp(-self.log_bandwidth)

    def pair(self, u: Tensor, v: Tensor) -> Tensor:
        norms = u.square().sum(1).unsqueeze(1) + v.square().sum(1)
        return torch.exp(-0.5 * (norms - 2.0 * (u @ v.t())).clamp(min=0.0))

    def nonnegative(self, inputs_nonnegative: bool) -> bool:
        return True

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({self.in_channels}, {self.out_channels})'


class Attention(Metric):
    r"""Multi-head attention with shared keys and queries, hence symmetric.

    .. math::
        s_{ij} = \frac{1}{m} \sum_{p=1}^{m} \frac{\mathrm{ReLU}(\mathbf{W}_p
        \mathbf{v}_i)^{\top} \, \mathrm{ReLU}(\mathbf{W}_p \mathbf{v}_j)}{\sqrt{h}}

    Args:
        in_channels (int): Size of each input sample.
        out_channels (int, optional): Size :math:`h` of each head.
            (default: :obj:`16`)
        heads (int, optional): Number of heads :math:`m`. (default: :obj:`4`)
    """

    inner_product = True

    def __init__(
        self, in_channels: int, out_channels: int = 16, heads: int = 4
    ) -> None:
        super().__init__()
        check_at_least('in_channels', in_channels, 1, integer=True)
        check_at_least('out_channels', out_channels, 1, integer=True)
        check_at_least('heads', heads, 1, integer=True)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.weight = Parameter(torch.empty(in_channels, heads * out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(6.0 / (self.in_channels + self.out_channels))
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def embed(self, x: Tensor | SparseMatrix) -> Tensor:
        scale = (self.heads * math.sqrt(self.out_channels)) ** -0.5
        return scale * x.matmul(self.weight).relu()

    def nonnegative(self, inputs_nonnegative: bool) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f'{self.__class__.__name__}({self.in_channels}, {self.out_channels}, '
            f'heads={self.heads})'
        )


# They embed every row by itself; others may normalise over rows, or drop entries.
ROWWISE = (WeightedCosine, Cosine, RBF, Attention)


class CustomMetric(Metric):
    """A user's own module, called with two sets of feature vectors.

    Args:
        module (torch.nn.Module): From :obj:`[n, d]` and :obj:`[s, d]` to similarities
            of shape :obj:`[n, s]`. If it has a true attribute :obj:`symmetric`,
            swapping its arguments must transpose the result.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.symmetric = bool(getattr(module, 'symmetric', False))

    def reset_parameters(self) -> None:
        reset = getattr(self.module, 'reset_parameters', None)
        if reset is not None:
            reset()

    def embed(self, x: Tensor | SparseMatrix) -> Tensor:
        return x.to_dense()

    def pair(self, u: Tensor, v: Tensor) -> Tensor:
        scores = self.module(u, v)
        if scores.shape != (u.size(0), v.size(0)):
            raise ValueError(
                f'Expected the metric to return similarities of shape '
                f'{[u.size(0), v.size(0)]} (got {list(scores.shape)})'
            )
        return scores


MetricLike = str | Module | Callable[[int], Module]


def resolve_metric(metric: MetricLike, in_channels: int, heads: int) -> Metric:
    """The metric of a given name, or around a user's module.

    Args:
        metric (str or torch.nn.Module or Callable): A name, a module (taken as it is,
            not copied), or a function from the number of input channels to a module.
        in_channels (int): Size of each input sample.
        heads (int): Number of heads, for metrics that have them.
    """
    known: dict[str, Callable[[], Metric]] = {
        'weighted_cosine': lambda: WeightedCosine(in_channels, heads),
        'cosine': Cosine,
        'rbf': lambda: RBF(in_channels),
        'attention': lambda: Attention(in_channels, heads=heads),
    }
    if isinstance(metric, str):
        if metric not in known:
            raise ValueError(
                f"Expected 'metric' to be one of {sorted(known)} (got '{metric}')"
            )
        return known[metric]()
    if not callable(metric):
        raise TypeError(
            f"Expected 'metric' to be a name, a module or a function of input channels "
            f"(got '{type(metric).__name__}')"
        )
    module = metric if isinstance(metric, Module) else metric(in_channels)
    if not isinstance(module, Module):
        raise TypeError(
            f"Expected 'metric' to give a 'torch.nn.Module' "
            f"(got '{type(module).__name__}')"
        )
    own = getattr(module, 'in_channels', in_channels)
    if own != in_channels:
        raise ValueError(
            f"Expected 'metric' to take {in_channels} channels: one metric compares "
            f'features, another embeddings (got {module}, which takes {own}); give a '
            f'function of the channels, such as its class'
        )
    return module if isinstance(module, Metric) else CustomMetric(module)
