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
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import CONFIGS, RESULTS, read_json, read_yaml, table
from options import add_options, explain_errors, positive, run_options
from records import (
    add_run,
    checkpoint_file,
    fitted,
    read_runs,
    run_missing,
    score_cell,
)
from systems import ABLATIONS, FIT, System
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.loader import DataLoader

from torch_geometric_idgl import IDGL, DocumentGNN, IDGLAnch
from torch_geometric_idgl.datasets import (
    MovieReviews,
    NewsGroups20,
    WordVectors,
    load_word_vectors,
    stage_data,
)
from torch_geometric_idgl.loader import BucketSampler
from torch_geometric_idgl.nn.backbone import Backbone, resolve_layer
from torch_geometric_idgl.nn.inputs import prepare
from torch_geometric_idgl.training import accuracy, fit, r2_score

CONFIG = CONFIGS / 'documents.yaml'
DATASETS = {'20news': NewsGroups20, 'mrd': MovieReviews}
HEADS = {'20news': '20News accuracy', 'mrd': 'Movie reviews R²'}
SPLITS = ('train', 'val', 'test')
MAX_TOKENS = 1000  # of a document, as in the paper
# The rows of the table, by their names.
SYSTEMS = {name: System(name) for name in ('bilstm', 'gcn-knn')}
for _base in ('idgl', 'idgl-anch'):
    for _ablation in (None, 'nosmooth', 'noreg', 'noil'):
        SYSTEMS[str(System(_base, _ablation))] = System(_base, _ablation)
# Settings of the data and the document model, not of its GNN.
OWN = ('vectors', 'split_seed', 'max_tokens', 'batch_size', 'word_dropout')


class KNNGCN(torch.nn.Module):
    """A GCN on the kNN graph of the word vectors of each document."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float,
        k: int,
    ) -> None:
        super().__init__()
        layers = {'act': 'relu', 'act_first': False, 'act_kwargs': None, 'jk': None}
        layers |= {'norm': None, 'norm_kwargs': None}
        make_layer = resolve_layer('gcn', bias=False)
        sizes = (in_channels, out_channels, num_layers, out_channels)
        self.backbone = Backbone(*sizes, make_layer=make_layer, **layers)
        self.out_channels, self.dropout, self.k = out_channels, dropout, k

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        self.backbone.reset_parameters()

    def forward(
        self, x: Tensor, batch: Tensor, batch_size: int, graph_x: Tensor
    ) -> Tensor:
        options = {'k': self.k, 'normalize': True, 'add_self_loops': True}
        graph = (x, graph_x, None, None, batch, batch_size)
        inputs = prepare(*graph, together=False, **options)
        outs, rows = [], []
        for part in inputs.parts:
            projected, message = self.backbone.project(part.x)
            graph = part.initial.multiplied(message)
            _, last = self.backbone.embed(projected, graph, part.x.nodes, self.dropout)
            outs.append(self.backbone.predict(last, graph))
            rows.append(inputs.x.nodes.rows_of(part.graphs))
        out = torch.cat(outs)
        return torch.empty_like(out).index_copy(0, torch.cat(rows), out)


def find_system(name: str) -> System:
    """The system of a name."""
    if name not in SYSTEMS:
        raise ValueError(f'Expected one of {", ".join(SYSTEMS)} (got {name!r})')
    return SYSTEMS[name]


def load_settings(
    system: System,
    dataset: str,
    vectors: str | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """The settings of a system on a data set, perhaps with other word vectors or with
    documents that are cut elsewhere.
    """
    config = read_yaml(CONFIG)
    settings = {
        **config['default'],
        **config['data'][dataset],
        **config[system.base][dataset],
    }
    if system.ablation:
        settings.update(ABLATIONS[system.ablation])
        settings.pop('first_phase', None)  # there is none
    if vectors is not None:
        if vectors not in config['vectors']:
            raise ValueError(
                f"Expected '--vectors' to be one of {', '.join(config['vectors'])}, as "
                f'configs/{CONFIG.name} names them (got {vectors!r})'
            )
        settings['vectors'] = vectors
    if max_tokens is not None:
        settings['max_tokens'] = max_tokens
    return settings


def vectors_file(name: str, root: str) -> Path:
    """Where word vectors are; an error says where to put them."""
    file = Path(root) / read_yaml(CONFIG)['vectors'][name]['file']
    if not file.exists():
        raise FileNotFoundError(
            f"There is no file '{file}' of the word vectors '{name}'; put it there, or "
            f"name others by '--vectors'"
        )
    return file


def load_vectors(name: str, vocab: list[str], root: str) -> WordVectors:
    """The word vectors of a name, scaled to their length if it is given."""
    length = read_yaml(CONFIG)['vectors'][name].get('length')
    file = vectors_file(name, root)
    vectors = load_word_vectors(file, vocab, normalize=length is not None)
    return vectors._replace(weight=(length or 1.0) * vectors.weight)


def make_model(
    base: str, settings: dict[str, Any], vectors: Tensor, dataset: str, classes: int
) -> DocumentGNN:
    """Builds the network of a system."""
    hidden = settings['hidden_channels']
    options = {key: settings[key] for key in settings if key not in {*OWN, *FIT}}
    gnn: torch.nn.Module | None = None
    if base == 'gcn-knn':
        options.pop('hidden_channels')
        gnn = KNNGCN(hidden, hidden, **options)
    elif base != 'bilstm':
        cls = IDGL if base == 'idgl' else IDGLAnch
        if base == 'idgl-anch':  # as in the paper, unless settings say otherwise
            options.setdefault('scale_regularizer', False)
        gnn = cls(hidden, graph_channels=vectors.size(1), **options)
    act = torch.sigmoid if dataset == 'mrd' else None
    dropout = settings['word_dropout']
    return DocumentGNN(vectors, hidden, classes, gnn, dropout=dropout, act=act)


def run(
    system: System,
    dataset: str,
    seed: int,
    root: str,
    *,
    settings: dict[str, Any],
    device: torch.device | str = 'cpu',
    progress: bool = True,
    checkpoint: Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Trains a system once; returns scores, epochs and seconds. With :obj:`limit` it
    is trained on so many documents; dev and test documents are always all.
    """
    vectors_file(settings['vectors'], root)  # before documents are read for long
    cut = (settings['split_seed'], settings['max_tokens'])
    folder, cls = str(Path(root) / dataset), DATASETS[dataset]
    train, val, test = (cls(folder, split, *cut, log=progress) for split in SPLITS)
    vectors = load_vectors(settings['vectors'], train.vocab, root)
    seed_everything(seed)
    data = (vectors.weight, dataset, train.num_classes)
    network = make_model(system.base, settings, *data).to(device)

    def load(documents: Any, shuffle: bool = False) -> DataLoader:
        sampler = BucketSampler(documents, settings['batch_size'], shuffle)
        return DataLoader(documents, batch_sampler=sampler)

    record = fit(
        network,
        load(train[:limit], shuffle=True),  # the split is in random order
        load(val),
        load(test),
        loss_fn=F.mse_loss if dataset == 'mrd' else F.cross_entropy,
        score_fn=r2_score if dataset == 'mrd' else accuracy,
        progress=progress,
        desc=f'{system.title} on {dataset}, seed {seed}',
        checkpoint=checkpoint,
        history=True,
        **{key: settings[key] for key in FIT if key in settings},
    )
    return {
        **fitted(record, network),
        'words_with_vectors': float(vectors.found.float().mean()),
        'dev_by_epoch': [values['val_score'] for values in record.history or []],
    }


def results_file(
    dataset: str, system: System, folder: Path = RESULTS, max_tokens: int = MAX_TOKENS
) -> Path:
    """Where the runs of a pair are kept."""
    cut = '' if max_tokens == MAX_TOKENS else f'-{max_tokens}-tokens'
    return folder / 'documents' / f'{dataset}{cut}_{system}.json'


def run_pair(
    dataset: str,
    system: System,
    runs: int,
    root: str,
    settings: dict[str, Any],
    first: int = 0,
    *,
    folder: Path = RESULTS,
    device: torch.device | str = 'cpu',
    progress: bool = True,
    max_epochs: int | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Runs the seeds of a pair that are not in its results file yet, and adds them.

    With other :obj:`max_epochs` a killed run goes on as well. Returns the runs of all
    these seeds.
    """
    file = results_file(dataset, system, folder, settings['max_tokens'])
    end = settings['max_epochs'] if max_epochs is None else max_epochs
    about = {'dataset': dataset, 'system': str(system), 'settings': settings}
    about['documents'] = limit or 'all'

    command = f'python benchmarks/documents.py --dataset {dataset} --model {system}'
    command += f' --max-epochs {max_epochs}' * (max_epochs is not None)
    command += f' --limit {limit}' * (limit is not None)
    command += f' --max-tokens {settings["max_tokens"]} --vectors {settings["vectors"]}'

    def run_seed(seed: int) -> dict[str, Any]:
        kept = [settings, limit]
        record = run(
            *(system, dataset, seed, root),
            settings={**settings, 'max_epochs': end},
            device=device,
            progress=progress,
            checkpoint=checkpoint_file(root, dataset, system, kept, seed, 'documents'),
            limit=limit,
        )
        record['stopped_early'] = record['epochs'] < end
        return add_run(file, about, command, seed, record, device)

    stored = read_runs(file, about)['runs']
    seeds = range(first, first + runs)
    return run_missing(f'{dataset} {system}', stored, seeds, run_seed)


def make_table(folder: Path = RESULTS) -> str:
    """Test scores in percent beside the paper's."""
    reported = read_yaml(CONFIG)['reported']
    columns = {
        (dataset, tokens): f'{HEADS[dataset]} ({tokens} tokens)'
        for dataset in DATASETS
        for tokens in (MAX_TOKENS, *_shorter(dataset, folder))
    }
    rows = []
    for name, system in SYSTEMS.items():
        row = [system.title]
        for dataset, tokens in columns:
            content = read_json(results_file(dataset, system, folder, tokens))
            figure = (
                reported.get(name, {}).get(dataset) if tokens == MAX_TOKENS else None
            )
            remark = _remark(content, system, dataset) if content else ''
            scores = [run['test'] for run in content['runs']] if content else []
            row.append(score_cell(scores, figure, remark))
        rows.append(row)
    return table(['', *columns.values()], rows)


def _shorter(dataset: str, folder: Path) -> list[int]:
    """Where else documents have been cut, the longest first."""
    files = (folder / 'documents').glob(f'{dataset}-*-tokens_*.json')
    found = (re.match(rf'{dataset}-(\d+)-tokens_', file.name) for file in files)
    return sorted({int(match[1]) for match in found if match}, reverse=True)


def _remark(content: dict[str, Any], system: System, dataset: str) -> str:
    """What a cell says of runs that are not as they should be."""
    used, remark = content['settings'], ''
    now = load_settings(system, dataset, max_tokens=used['max_tokens'])
    if used['vectors'] != now['vectors']:
        remark += f', {used["vectors"]}'
    if not all(run['stopped_early'] for run in content['runs']):
        remark += f', {max(run["epochs"] for run in content["runs"])} epochs at most'
    if content['documents'] != 'all':
        remark += f', {content["documents"]} training documents'
    changed = {**used, 'vectors': now['vectors']} != now
    return ', with other settings' * changed + remark


def stage(source: Path, root: Path) -> None:
    """Links archives and vectors of a read-only folder to where they are looked for."""
    if not source.is_dir():
        raise FileNotFoundError(f"There is no directory '{source}' to read data from")
    vectors = read_yaml(CONFIG)['vectors'].values()
    folders = {Path(entry['file']).parent for entry in vectors}
    links = {source / folder: root / folder for folder in folders}
    links |= {source / dataset: root / dataset / 'raw' for dataset in DATASETS}
    for folder, target in links.items():
        if folder.is_dir():
            stage_data(folder, target)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add('--dataset', choices=[*DATASETS])
    add('--model', default='idgl', help=', '.join(SYSTEMS))
    add('--runs', type=positive, default=1, help='number of seeds')
    add('--first', type=int, default=0, help='first seed')
    add('--vectors', help='a name in configs/documents.yaml')
    add('--max-tokens', type=positive, help='cut documents there (default: 1000)')
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
        system = find_system(args.model)
        settings = load_settings(system, args.dataset, args.vectors, args.max_tokens)
        if args.source:
            stage(Path(args.source), Path(args.root))
        options = {'max_epochs': args.max_epochs, 'limit': args.limit}
        options |= {'first': args.first, **run_options(args)}
        run_pair(args.dataset, system, args.runs, args.root, settings, **options)
        print()
    print(make_table(args.results))
    return 0


if __name__ == '__main__':
    sys.exit(main())
