"""The graph of a trained model as a transform."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import cumsum

from torch_geometric_idgl.checks import check_at_least
from torch_geometric_idgl.graphs import AnchorGraph, GraphOperator
from torch_geometric_idgl.nn import IDGL, IDGLAnch, Trace

from ._edges import check_data, set_edges

__all__ = ['LearnGraph']


@functional_transform('idgl_learn_graph')
class LearnGraph(BaseTransform):
    r"""Replaces the graph by the one that a trained model has learned for it.

    (functional name: :obj:`idgl_learn_graph`). The model is run in evaluation mode
    without gradients, and the graph of its last iteration is written as
    :obj:`edge_index` and :obj:`edge_weight`, such that any GNN can use it. Other
    attributes of the former edges are removed. The model itself stays as it is.

    .. code-block:: python

        data = LearnGraph(model, top_k=20)(data)
        out = gnn(data.x, data.edge_index, data.edge_weight)

    Args:
        model (IDGL): The trained :class:`~torch_geometric_idgl.nn.IDGL` or
            :class:`~torch_geometric_idgl.nn.IDGLAnch` model.
        kind (str, optional): The graph to write: the one that messages were passed
            over, which contains the initial graph (:obj:`"mixed"`), or the learned one
            alone (:obj:`"learned"`): the similarities of nodes, or with anchors the
            two-step walks :math:`\mathbf{\Delta}^{-1} \mathbf{R}
            \mathbf{\Lambda}^{-1} \mathbf{R}^{\top}`. (default: :obj:`"mixed"`)
        min_weight (float, optional): Only edges with a weight above this one are
            kept. (default: :obj:`0.`)
        top_k (int, optional): If given, only the edges with the :obj:`top_k` largest
            weights into each node are kept. (default: :obj:`None`)
        max_edges (int, optional): The number of edges, before :obj:`top_k` drops any,
            above which an error is raised instead of filling the memory: a learned
            graph without sparsification is complete. (default: :obj:`33_554_432`)
    """

    def __init__(
        self,
        model: IDGL,
        kind: str = 'mixed',
        min_weight: float = 0.0,
        top_k: int | None = None,
        max_edges: int = 33_554_432,
    ) -> None:
        if not isinstance(model, IDGL):
            raise TypeError(
                f"Expected 'model' to be an 'IDGL' or 'IDGLAnch' model (got "
                f"'{type(model).__name__}')"
            )
        if kind not in {'mixed', 'learned'}:
            raise ValueError(
                f"Expected 'kind' to be one of 'mixed', 'learned' (got {kind!r})"
            )
        check_at_least('min_weight', min_weight, 0)
        check_at_least('max_edges', max_edges, 1, integer=True)
        if top_k is not None:
            check_at_least('top_k', top_k, 1, integer=True)
        self.model = model
        self.kind = kind
        self.min_weight = min_weight
        self.top_k = top_k
        self.max_edges = max_edges

    @torch.no_grad()
    def forward(self, data: Data) -> Data:
        """Returns :obj:`data` with its edges replaced."""
        check_data(data, 'x')
        _, trace = _for_evaluation(self.model)(data, return_trace=True)
        edge_index, weight = self._graph(trace).to_edges(
            max_edges=self.max_edges, min_weight=self.min_weight
        )
        if self.top_k is not None:
            rank = _incoming_rank(edge_index[1], weight, data.num_nodes)
            keep = rank < self.top_k
            edge_index, weight = edge_index[:, keep], weight[keep]
        return set_edges(data, edge_index, edge_weight=weight)

    def _graph(self, trace: Trace) -> GraphOperator:
        if self.kind == 'mixed':
            return trace.mixed
        if isinstance(self.model, IDGLAnch):  # `learned` relates nodes to anchors.
            return AnchorGraph(trace.learned)
        return trace.learned

    def __repr__(self) -> str:
        return f'{self.__class__.__name__}({self.model}, kind={self.kind!r})'


def _incoming_rank(target: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    # The place of each edge among the edges into its target, heaviest first.
    order = weight.argsort(descending=True, stable=True)
    order = order[target[order].argsort(stable=True)]
    first = cumsum(target.bincount(minlength=num_nodes))
    position = torch.arange(target.numel(), device=target.device)
    rank = torch.empty_like(position)
    rank[order] = position - first[target[order]]
    return rank


def _for_evaluation(model: IDGL) -> IDGL:
    # A copy that shares all parameters and buffers: the model itself, which may be in
    # use elsewhere, stays in its mode. Nor is what it has cached of use here, as that
    # is the graph it was trained on, perhaps not this one.
    tensors = [*model.parameters(), *model.buffers()]
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    model.cached = False
    return model.eval()
