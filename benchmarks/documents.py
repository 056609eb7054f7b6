"""Documents: test accuracy on 20 Newsgroups, R² on movie reviews.

    python benchmarks/documents.py --dataset 20news --model idgl
    python benchmarks/documents.py --dataset mrd --model bilstm --runs 3
    python benchmarks/documents.py --table

Each finished seed is written to benchmarks/results/documents/ at once and never run
again; a killed one goes on from its last epoch. Data and word vectors are read from
`--root`: archives in 20news/raw and mrd/raw (downloaded if absent), vectors where
configs/documents.yaml says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import CONFIGS, RESULTS, read_json, read_yaml, table
from options import add_options, explain_errors, positive
from records import checkpoint_file, fitted, run_missing, score_cell
from systems import ABLATIONS, FIT, System
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.loader import DataLoader
from torch_geometric.nn import Linear
from torch_geometric.utils import unbatch

from torch_geometric_idgl import IDGL, DocumentGNN, IDGLAnch
from torch_geometric_idgl.datasets import (
    MovieReviews,
    NewsGroups20,
    WordVectors,
    load_word_vectors,
    stage_data,
)
from torch_geometric_idgl.loader import BucketSampler
from torch_geometric_idgl.ops.knn import knn_matrix
from torch_geometric_idgl.training import accuracy, fit, r2_score

CONFIG = CONFIGS / 'documents.yaml'
DATASETS = {'20news': NewsGroups20, 'mrd': MovieReviews}
HEADS = {'20news': '20News accuracy', 'mrd': 'Movie reviews R²'}
MAX_TOKENS = 1000  # of a document, as in the paper
# The rows of the table, by their names.
SYSTEMS = {name: System(name) for name in ('bilstm', 'gcn-knn')}
for _base in ('idgl', 'idgl-anch'):
    for _ablation in ('', 'nosmooth', 'noreg', 'noil'):
        SYSTEMS[str(System(_base, _ablation))] = System(_base, _ablation)
# Settings of the data and the document model, not of its GNN.
OWN = ('vectors', 'split_seed', 'max_tokens', 'batch_size', 'word_dropout')


class KNNGCN(torch.nn.Module):
    """A GCN on the kNN graph of the word vectors of each document."""

    def __init__(self, channels: int, num_layers: int, dropout: float, k: int) -> None:
        super().__init__()
        self.out_channels, self.dropout, self.k = channels, dropout, k
        layers = (
            Linear(channels, channels, False, 'glorot') for _ in range(num_layers)
        )
        self.layers = torch.nn.ModuleList(layers)

    def forward(
        self, x: Tensor, batch: Tensor, batch_size: int, graph_x: Tensor
    ) -> Tensor:
        graphs = [self._graph(words) for words in unbatch(graph_x.detach(), batch)]
        for i, layer in enumerate(self.layers):
            x = F.dropout(x.relu(), self.dropout, self.training) if i > 0 else x
            parts = zip(graphs, unbatch(layer(x), batch), strict=True)
            x = torch.cat([graph @ part for graph, part in parts])
        return x

    def _graph(self, words: Tensor) -> Tensor:
        """The matrix of edges from each token to its nearest ones."""
        n, k = len(words), min(self.k, len(words))
        graph = knn_matrix(words, k).t().to(words) if k < n else words.new_ones(n, n)
        return graph / k


def load_settings(system: System, dataset: str, **changed: Any) -> dict[str, Any]:
    """The settings of a system on a data set, perhaps some of them changed."""
    config = read_yaml(CONFIG)
    settings = {**config['default'], **config['data'][dataset]}
    settings |= config[system.base][dataset] | ABLATIONS.get(system.ablation, {})
    settings.pop('first_phase', None)  # there is none
    return settings | changed


def load_vectors(name: str, vocab: list[str], root: str) -> WordVectors:
    """The word vectors of a name, scaled to their length if it is given."""
    entry = read_yaml(CONFIG)['vectors'][name]
    file, length = Path(root) / entry['file'], entry.get('length')
    if not file.exists():
        raise FileNotFoundError(
            f"There is no file '{file}' of the word vectors '{name}'; put it there, or "
            f"name others by '--vectors'"
        )
    vectors = load_word_vectors(file, vocab, normalize=length is not None)
    return vectors._replace(weight=(length or 1.0) * vectors.weight)


def make_model(
    base: str, settings: dict[str, Any], vectors: Tensor, dataset: str, classes: int
) -> DocumentGNN:
    """Builds the network of a system."""
    options = {key: settings[key] for key in settings if key not in {*OWN, *FIT}}
    hidden = options.pop('hidden_channels')
    gnn: torch.nn.Module | None = None
    if base == 'gcn-knn':
        gnn = KNNGCN(hidden, **options)
    elif base == 'idgl':
        gnn = IDGL(hidden, hidden, graph_channels=vectors.size(1), **options)
    elif base == 'idgl-anch':  # as in the paper, unless settings say otherwise
        options = {'scale_regularizer': False, **options}
        gnn = IDGLAnch(hidden, hidden, graph_channels=vectors.size(1), **options)
    act = torch.sigmoid if dataset == 'mrd' else None
    dropout = settings['word_dropout']
    return DocumentGNN(vectors, hidden, classes, gnn, dropout=dropout, act=act)


def run(
    args: argparse.Namespace, settings: dict[str, Any], seed: int, checkpoint: Path
) -> dict[str, Any]:
    """Trains a system once; returns scores, epochs and seconds."""
    dataset, system = args.dataset, SYSTEMS[args.model]
    cut = (settings['split_seed'], settings['max_tokens'])
    train, val, test = (
        DATASETS[dataset](f'{args.root}/{dataset}', split, *cut, log=not args.quiet)
        for split in ('train', 'val', 'test')
    )
    vectors = load_vectors(settings['vectors'], train.vocab, args.root)
    seed_everything(seed)
    data = (vectors.weight, dataset, train.num_classes)
    network = make_model(system.base, settings, *data).to(args.device)

    def load(documents: Any, shuffle: bool = False) -> DataLoader:
        sampler = BucketSampler(documents, settings['batch_size'], shuffle)
        return DataLoader(documents, batch_sampler=sampler)

    record = fit(
        network,
        load(train[: args.limit], shuffle=True),  # the split is in random order
        load(val),
        load(test),
        loss_fn=F.mse_loss if dataset == 'mrd' else F.cross_entropy,
        score_fn=r2_score if dataset == 'mrd' else accuracy,
        progress=not args.quiet,
        desc=f'{system.title} on {dataset}, seed {seed}',
        checkpoint=checkpoint,
        history=True,
        **{key: settings[key] for key in FIT if key in settings},
    )
    return {
        **fitted(record, network),
        'words_with_vectors': float(vectors.found.float().mean()),
        'dev_by_epoch': [values['val_score'] for values in record.history or []],
        'stopped_early': record.epochs < settings['max_epochs'],
    }


def run_seeds(args: argparse.Namespace) -> None:
    """Runs the seeds that are not in the results file yet, and adds them."""
    dataset, model, limit = args.dataset, args.model, args.limit
    changed = {'vectors': args.vectors, 'max_tokens': args.max_tokens}
    settings = load_settings(SYSTEMS[model], dataset, **changed)
    cut = '' if args.max_tokens == MAX_TOKENS else f'-{args.max_tokens}-tokens'
    file = args.results / 'documents' / f'{dataset}{cut}_{model}.json'
    about = {'dataset': dataset, 'system': model, 'settings': settings}
    about |= {'documents': limit or 'all'}
    given = {'dataset': dataset, 'model': model, 'max-epochs': args.max_epochs}
    given |= {'limit': limit, 'max-tokens': args.max_tokens, 'vectors': args.vectors}
    command = 'python benchmarks/documents.py'
    command += ''.join(f' --{key} {value}' for key, value in given.items() if value)

    def run_seed(seed: int) -> dict[str, Any]:
        where = (args.root, dataset, model, [settings, limit], seed, 'documents')
        end = args.max_epochs or settings['max_epochs']
        used = {**settings, 'max_epochs': end}
        return run(args, used, seed, checkpoint_file(*where))

    seeds = range(args.first, args.first + args.runs)
    run_missing(file, about, command, seeds, run_seed, args.device)


def make_table(folder: Path = RESULTS) -> str:
    """Test scores in percent beside the paper's, by where documents were cut."""
    reported = {
        (dataset, MAX_TOKENS, name): figure
        for name, figures in read_yaml(CONFIG)['reported'].items()
        for dataset, figure in figures.items()
    }
    found = {}
    for content in map(read_json, (folder / 'documents').glob('*.json')):
        tokens = content['settings']['max_tokens']
        found[content['dataset'], tokens, content['system']] = content
    columns = {key[:2] for key in (*reported, *found)}
    columns = sorted(columns, key=lambda column: (column[0], -column[1]))
    rows = []
    for name, system in SYSTEMS.items():
        keys = [(*column, name) for column in columns]
        cells = [_cell(found.get(key), reported.get(key)) for key in keys]
        rows.append([system.title, *cells])
    heads = [f'{HEADS[dataset]} ({tokens} tokens)' for dataset, tokens in columns]
    return table(['', *heads], rows)


def _cell(content: dict[str, Any] | None, figure: float | None) -> str:
    """The scores of a results file, and what is not as it should be."""
    if content is None:
        return score_cell([], figure)
    used, runs, remark = content['settings'], content['runs'], ''
    now = load_settings(SYSTEMS[content['system']], content['dataset'])
    if used != now | {key: used[key] for key in ('vectors', 'max_tokens')}:
        remark += ', with other settings'
    if used['vectors'] != now['vectors']:
        remark += f', {used["vectors"]}'
    if not all(run['stopped_early'] for run in runs):
        remark += f', {max(run["epochs"] for run in runs)} epochs at most'
    if content['documents'] != 'all':
        remark += f', {content["documents"]} training documents'
    return score_cell([run['test'] for run in runs], figure, remark)


def stage(source: Path, root: Path) -> None:
    """Links the files of a read-only folder, archives to where they are looked for."""
    stage_data(source, root)
    for dataset in DATASETS:
        if (source / dataset).is_dir():
            stage_data(source / dataset, root / dataset / 'raw')


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, config = parser.add_argument, read_yaml(CONFIG)
    add('--dataset', choices=[*DATASETS])
    add('--model', choices=[*SYSTEMS], default='idgl')
    add('--runs', type=positive, default=1, help='number of seeds')
    add('--first', type=int, default=0, help='first seed')
    add('--vectors', choices=config['vectors'], default=config['default']['vectors'])
    add('--max-tokens', type=positive, default=MAX_TOKENS, help='cut documents there')
    add('--max-epochs', type=positive, help='stop there; a killed run may be ended so')
    add('--limit', type=positive, help='train on so many documents, for less time')
    add('--table', action='store_true', help='only show all results')
    add_options(parser)
    args = parser.parse_args(argv)
    if args.table == bool(args.dataset):
        parser.error('give either --dataset or --table')
    return args


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.dataset:
        if args.source:
            stage(Path(args.source), Path(args.root))
        run_seeds(args)
        print()
    print(make_table(args.results))
    return 0


if __name__ == '__main__':
    sys.exit(main())
