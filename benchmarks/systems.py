"""The systems of the comparison: which data they run on, their settings, one run.

A name is a system, perhaps an ablation or variant of it, and perhaps the word `tuned`
for settings found by `search.py`: `idgl`, `idgl-anch-noreg`, `gcn-tuned`.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baselines import HGCN, diffuse, fit_classical, fit_lds, make_gnn
from common import CONFIGS, DATASETS, GRAPHS, PLANETOID, TABLES, read_yaml
from records import fitted
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import APPNP

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.datasets import load
from torch_geometric_idgl.training import accuracy, fit
from torch_geometric_idgl.training.checkpoint import replacing
from torch_geometric_idgl.transforms import CosineKNNGraph

# Titles, and which data a system runs on. LDS holds a probability for each of the n²
# pairs, and IDGL (without anchors) considers them all.
_SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    'bilstm': ('BiLSTM', ()),  # of documents
    'gcn': ('GCN', GRAPHS),
    'gat': ('GAT', PLANETOID),
    'graphsage': ('GraphSAGE', GRAPHS),
    'appnp': ('APPNP', PLANETOID),
    'hgcn': ('H-GCN', PLANETOID),
    'gcn-gdc': ('GCN+GDC', PLANETOID),
    'lds': ('LDS', ('cora', 'citeseer', *TABLES)),
    'logreg': ('Logistic regression', TABLES),
    'rbf-svm': ('RBF SVM', TABLES),
    'gcn-knn': ('GCN-kNN', TABLES),
    'gat-knn': ('GAT-kNN', TABLES),
    'graphsage-knn': ('GraphSAGE-kNN', TABLES),
    'idgl': ('IDGL', (*PLANETOID, *TABLES)),
    'idgl-anch': ('IDGL-Anch', DATASETS),
}
TITLES = {name: title for name, (title, _) in _SYSTEMS.items()}
SUPPORTED = {name: data for name, (_, data) in _SYSTEMS.items() if data}

# What ablations and variants change.
ABLATIONS: dict[str, dict[str, Any]] = {
    'noreg': {'smoothness': 0.0, 'connectivity': 0.0, 'sparsity': 0.0},
    'noil': {'max_iters': 0, 'first_phase': 0},  # all epochs are of the one kind
    # Of documents. The term is there in the released code, but gets no gradient.
    'nosmooth': {'smoothness': 0.0},
    # Not the paper's setting for Citeseer, which has none.
    'iterdrop': {'iter_dropout': 0.5},
    # Seeds, initial weights and loops of the released runs: see `load_settings`.
    'authors': {},
}
ABLATION_TITLES = {
    'noreg': 'w/o graph reg.',
    'noil': 'w/o IL',
    'nosmooth': 'w/o smoothness',
    'iterdrop': "with dropout in iterations (not the paper's setting)",
    'authors': "with the authors' seeds",
}

# What predictions are smoothed with, the least first; no step at all is among it.
SMOOTHING = [(0.0, 0)]
SMOOTHING += [(alpha, k) for alpha in (0.5, 0.8, 0.9) for k in (1, 2, 5, 10, 20)]
SMOOTHED = ('gcn', 'gat', 'appnp', 'gcn-knn', 'gat-knn', 'idgl', 'idgl-anch')

# Arguments of `fit`; all other settings are the model's, or the data's.
FIT = ('lr', 'weight_decay', 'max_epochs', 'patience', 'first_phase', 'monitor')
# Of the data; `k` of those that start from a graph made of it.
OF_DATA = ('splits', 'seeds')


@dataclass(frozen=True)
class System:
    """A system by its parts; :obj:`str(system)` is its name."""

    base: str
    ablation: str = ''
    tuned: bool = False

    def __str__(self) -> str:
        parts = (self.base, self.ablation, 'tuned' * self.tuned)
        return '-'.join(filter(None, parts))

    @property
    def title(self) -> str:
        """How a table names it."""
        ablation = ABLATION_TITLES.get(self.ablation)
        parts = (TITLES[self.base], ablation, '(tuned)' * self.tuned)
        return ' '.join(filter(None, parts))

    @classmethod
    def parse(cls, name: str) -> System:
        """Looks a name up."""
        if name not in SYSTEMS:
            raise ValueError(
                f'Expected one of {", ".join(SUPPORTED)}, for IDGL also with '
                f"-{', -'.join(ABLATIONS)}, for all also with '-tuned' (got '{name}')"
            )
        return SYSTEMS[name]


SYSTEMS = {
    str(system): system
    for base in SUPPORTED
    for ablation in ('', *(ABLATIONS if base.startswith('idgl') else ()))
    for system in (System(base, ablation), System(base, ablation, True))
}


def load_settings(
    system: System, dataset: str, paper_splits: bool = False
) -> dict[str, Any]:
    r"""The hyper-parameters of a pair, all in one dictionary.

    Published settings are the defaults of the system and what the data set changes;
    tuned ones change these again, and so does an ablation. With :obj:`paper_splits`,
    they hold the seeds of the paper's splits, for data that has no split of its own.
    The variant `authors` has the :obj:`seeds` of the released runs: one number sets the
    split, the initial weights and dropout.
    """
    if dataset not in SUPPORTED[system.base]:
        raise ValueError(
            f"Expected one of {', '.join(SUPPORTED[system.base])} for '{system.base}' "
            f"(got '{dataset}')"
        )
    paper = read_yaml(CONFIGS / 'paper.yaml')
    own = system.base.startswith('idgl')
    published = (paper if own else read_yaml(CONFIGS / 'baselines.yaml'))[system.base]
    settings = {**published['default'], **(published.get(dataset) or {})}
    if system.tuned:
        changed = read_yaml(CONFIGS / 'tuned.yaml').get(system.base, {})
        if dataset not in changed:
            raise ValueError(
                f"Expected settings of '{system.base}' for '{dataset}' in tuned.yaml "
                f'(got none; `python benchmarks/search.py --dataset {dataset} --model '
                f'{system.base}` finds some)'
            )
        settings |= changed[dataset]
    if system.ablation:
        settings |= ABLATIONS[system.ablation]
    if paper_splits:
        if dataset not in TABLES:
            raise ValueError(
                f'Expected one of {", ".join(TABLES)}, whose splits are drawn (got '
                f"'{dataset}', which has one of its own)"
            )
        settings['splits'] = paper['splits'][dataset]
    if system.ablation == 'authors':
        settings['seeds'] = (paper['seeds'] | paper['splits'])[dataset]
    return settings


def load_data(
    base: str, dataset: str, settings: dict[str, Any], root: str, seed: int
) -> Data:
    """Loads the data of a run and makes the graph that the system starts from."""
    # IDGL finds sparse features by itself, and scikit-learn's data is dense.
    sparse_x = dataset in PLANETOID and not base.startswith('idgl')
    splits = settings.get('seeds') or settings.get('splits')
    split = splits[seed % len(splits)] if splits else seed
    data = load(dataset, root, seed=split, sparse_x=sparse_x)
    if dataset in TABLES and (base == 'lds' or base.endswith('-knn')):
        data = CosineKNNGraph(k=settings['k'], force_undirected=True)(data)
    if 'seeds' in settings and dataset == 'citeseer':
        _keep_loops(data, root)
    if base == 'gcn-gdc':
        data = _diffused(data, dataset, settings['alpha'], settings['k'], root)
    return data


def _keep_loops(data: Data, root: str) -> None:
    # PyG removes the self-loops of the file. The released code keeps them and adds the
    # identity, so that they count twice.
    file = Path(root) / 'Planetoid' / 'CiteSeer' / 'raw' / 'ind.citeseer.graph'
    graph = pickle.loads(file.read_bytes(), encoding='latin1')
    loops = torch.tensor([node for node, others in graph.items() if node in others])
    weight = torch.ones(data.num_edges + loops.numel())
    weight[data.num_edges :] = 2.0
    data.edge_index = torch.cat([data.edge_index, loops.expand(2, -1)], dim=1)
    data.edge_weight = weight


def _diffused(data: Data, dataset: str, alpha: float, k: int, root: str) -> Data:
    # The exact diffusion takes minutes on Pubmed and is the same for each seed.
    file = Path(root) / 'GDC' / f'{dataset}_ppr_{alpha:g}_top{k}.pt'
    if file.exists():
        data.edge_index = torch.load(file, weights_only=True)
        return data
    data = diffuse(data, alpha, k)
    with replacing(file) as temporary:
        torch.save(data.edge_index, temporary)
    return data


def make_model(base: str, settings: dict[str, Any], data: Data) -> torch.nn.Module:
    """Builds the network of a system that `fit` trains."""
    drop = {*FIT, *OF_DATA}
    drop |= {'alpha', 'k'} if base == 'gcn-gdc' else set()
    drop |= {'k'} if base.endswith('-knn') else set()
    kwargs = {key: value for key, value in settings.items() if key not in drop}
    num_features, num_classes = data.num_features, int(data.y.max()) + 1
    if base in ('idgl', 'idgl-anch'):
        cls = IDGL if base == 'idgl' else IDGLAnch
        if base == 'idgl-anch':  # as in the paper, unless settings say otherwise
            kwargs.setdefault('scale_regularizer', False)
        # The graph is the same at each step, so its normalisation is made once.
        return cls(num_features, out_channels=num_classes, cached=True, **kwargs)
    if base == 'hgcn':
        return HGCN(num_features, out_channels=num_classes, **kwargs)
    return make_gnn(base, num_features, num_classes, **kwargs)


@torch.no_grad()
def draw_as_authors(model: torch.nn.Module, seed: int) -> None:
    """Gives IDGL the initial weights that its released code draws with a seed: those of
    the layers first, each drawn as inputs by outputs, then those of the two learners.
    """
    torch.manual_seed(seed)
    init = torch.nn.init.xavier_uniform_
    for conv in model.backbone.convs:
        weight = conv.lin.weight
        weight.copy_(init(weight.new_empty(weight.t().shape)).t())
    for learner in (model.feature_learner, model.embedding_learner):
        init(learner.metric.weight)


def train(
    system: System, settings: dict[str, Any], data: Data, seed: int, **how: Any
) -> tuple[torch.nn.Module | None, dict[str, Any]]:
    """Trains a system; returns the network, if it is one, and what it reached. Beside
    the settings there are :obj:`progress`, :obj:`desc` and :obj:`checkpoint`.
    """
    base = system.base
    if base in ('logreg', 'rbf-svm'):
        return None, fit_classical(base, data, **settings)
    if base == 'lds':
        kwargs = {key: value for key, value in settings.items() if key != 'k'}
        return None, fit_lds(data, **kwargs, **how)
    model = make_model(base, settings, data).to(data.x.device)
    if system.ablation == 'authors':
        draw_as_authors(model, seed)
    options = {key: settings[key] for key in FIT if key in settings}
    found = fit(model, data, **options, **how)
    record = {'train': found.train_score, **fitted(found, model)}
    return model, {**record, 'dev_cross_entropy': cross_entropy(model, data)}


def run(
    system: System,
    dataset: str,
    seed: int,
    root: str,
    *,
    settings: dict[str, Any],
    device: torch.device | str = 'cpu',
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
    hide_test: bool = False,
) -> dict[str, Any]:
    r"""Trains a system once; returns scores, epochs and seconds. A half-finished run is
    kept in the file :obj:`checkpoint`, to go on from. With :obj:`hide_test` test labels
    are not readable, for a search on the dev set.
    """
    first = seed
    if 'seeds' in settings:
        first = settings['seeds'][seed % len(settings['seeds'])]
    seed_everything(first)
    data = load_data(system.base, dataset, settings, root, seed).to(device)
    settings = {key: value for key, value in settings.items() if key not in OF_DATA}
    if hide_test:
        data.y = data.y.where(data.train_mask | data.val_mask, -1)
        del data.test_mask
    how = {'progress': progress, 'checkpoint': checkpoint}
    model, record = train(system, settings, data, first, **how)
    if hide_test:
        record.pop('test', None)
    elif system.base in SMOOTHED:
        record['smoothed'] = smoothed(model, data)
    return record


@torch.no_grad()
def cross_entropy(model: torch.nn.Module, data: Data) -> float:
    """The prediction loss on the dev nodes, without regularisers: comparable between
    settings that weigh these differently.
    """
    weight = data.get('edge_weight')
    model.eval()
    out = model(data.x, data.edge_index, *([] if weight is None else [weight]))
    mask = data.val_mask
    return float(torch.nn.functional.cross_entropy(out[mask], data.y[mask]))


@torch.no_grad()
def smoothed(model: torch.nn.Module, data: Data) -> dict[str, Any]:
    """Dev and test accuracy of predictions smoothed over the last mixed graph, or
    over the normalised graph of a model that learns none. How much is chosen on the dev
    nodes of each run; of equals, the least.
    """
    model.eval()
    if isinstance(model, IDGL):
        smooth = model(data, return_trace=True)[1].smooth
    else:
        probs = model(data.x, data.edge_index).softmax(dim=-1)

        def smooth(alpha, steps):
            return APPNP(steps, 1.0 - alpha)(probs, data.edge_index)

    tried = []
    for alpha, steps in SMOOTHING:
        out = smooth(alpha, steps)
        masks = {'dev': data.val_mask, 'test': data.test_mask}
        scores = {key: accuracy(out[mask], data.y[mask]) for key, mask in masks.items()}
        tried.append({**scores, 'alpha': alpha, 'steps': steps})
    return max(tried, key=lambda found: found['dev'])  # the first of equals
