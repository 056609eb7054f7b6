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
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import CONFIGS, RESULTS, locked, percent, read_json, read_yaml, write_json
from options import add_options, explain_errors, positive, run_options
from systems import ABLATIONS, FIT, TITLES, System
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.loader import DataLoader

from torch_geometric_idgl import IDGL, DocumentGNN, IDGLAnch
from torch_geometric_idgl.datasets import (
    MovieReviews,
    NewsGroups20,
    WordVectors,
    load_word_vectors,
)
from torch_geometric_idgl.loader import BucketSampler
from torch_geometric_idgl.nn.backbone import Backbone, resolve_layer
from torch_geometric_idgl.nn.inputs import prepare
from torch_geometric_idgl.training import accuracy, fit, r2_score

DATASETS = {'20news': NewsGroups20, 'mrd': MovieReviews}
SCORES = {'20news': '20News (accuracy)', 'mrd': 'Movie reviews (R²)'}
MAX_TOKENS = 1000  # of a document, as in the paper
SHORT = {'20news': 100, 'mrd': 200}  # of documents cut shorter, to take less time
ROWS = ['bilstm', 'gcn-knn', 'idgl', 'idgl-noreg', 'idgl-noil']
ROWS += ['idgl-anch', 'idgl-anch-noreg', 'idgl-anch-noil']
TITLES = {**TITLES, 'bilstm': 'BiLSTM'}


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
        self.backbone = Backbone(
            in_channels,
            out_channels,
            num_layers,
            out_channels,
            act='relu',
            act_first=False,
            act_kwargs=None,
            norm=None,
            norm_kwargs=None,
            jk=None,
            make_layer=resolve_layer('gcn', bias=False),
        )
        self.out_channels, self.dropout, self.k = out_channels, dropout, k

    def forward(self, x: Tensor, batch: Tensor, batch_size: int, graph_x: Tensor):
        inputs = prepare(
            x,
            graph_x,
            None,
            None,
            batch,
            batch_size,
            k=self.k,
            normalize=True,
            add_self_loops=True,
            together=False,
        )
        outs, rows = [], []
        for part in inputs.parts:
            projected, message = self.backbone.project(part.x)
            graph = part.initial.multiplied(message)
            _, last = self.backbone.embed(projected, graph, part.x.nodes, self.dropout)
            outs.append(self.backbone.predict(last, graph))
            rows.append(inputs.x.nodes.rows_of(part.graphs))
        out = torch.cat(outs)
        return torch.empty_like(out).index_copy(0, torch.cat(rows), out)


def load_settings(model: str, dataset: str) -> dict[str, Any]:
    """The settings of a system, perhaps an ablation of it, on a data set."""
    base, ablation = parse(model)
    config = read_yaml(CONFIGS / 'documents.yaml')
    settings = {**config['default'], **config['data'][dataset], **config[base][dataset]}
    if ablation:
        settings.update(ABLATIONS[ablation])
        settings.pop('first_phase', None)  # there is none
    return settings


def parse(model: str) -> tuple[str, str | None]:
    """A system and its ablation."""
    if model not in ROWS:
        raise ValueError(f'Expected one of {", ".join(ROWS)} (got {model!r})')
    if model.startswith('idgl'):
        system = System.parse(model)
        return system.base, system.ablation
    return model, None


def title(model: str) -> str:
    """How a table names it."""
    return System.parse(model).title if model.startswith('idgl') else TITLES[model]


def load_vectors(name: str, vocab: list[str], root: str) -> WordVectors:
    """The word vectors of a name."""
    entry = read_yaml(CONFIGS / 'documents.yaml')['vectors'][name]
    file = Path(root) / entry['file']
    if not file.exists():
        raise FileNotFoundError(
            f"There is no file '{file}' of the word vectors '{name}'; put it there, or "
            f"name others by '--vectors'"
        )
    length = entry.get('length')
    vectors = load_word_vectors(file, vocab, normalize=length is not None)
    return vectors._replace(weight=(length or 1.0) * vectors.weight)


def make_model(
    base: str, settings: dict[str, Any], vectors: Tensor, dataset: str, classes: int
) -> DocumentGNN:
    """Builds the network of a system."""
    hidden = settings['hidden_channels']
    dropped = {'vectors', 'split_seed', 'max_tokens', 'batch_size', 'word_dropout'}
    dropped |= {*FIT}
    options = {key: value for key, value in settings.items() if key not in dropped}
    gnn: torch.nn.Module | None = None
    if base == 'gcn-knn':
        options.pop('hidden_channels')
        gnn = KNNGCN(hidden, hidden, **options)
    elif base != 'bilstm':
        cls = IDGL if base == 'idgl' else IDGLAnch
        if base == 'idgl-anch':  # as in the paper, unless settings say otherwise
            options.setdefault('scale_regularizer', False)
        gnn = cls(hidden, graph_channels=vectors.size(1), **options)
    return DocumentGNN(
        vectors,
        hidden,
        classes,
        gnn,
        dropout=settings['word_dropout'],
        act=torch.sigmoid if dataset == 'mrd' else None,
    )


def run(
    model: str,
    dataset: str,
    seed: int,
    root: str,
    settings: dict[str, Any],
    *,
    device: torch.device | str = 'cpu',
    progress: bool = True,
    checkpoint: Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Trains a system once; returns scores, epochs and seconds.

    Args:
        model (str): The system.
        dataset (str): The data to train it on.
        seed (int): Of weights, dropout and the order of documents.
        root (str): Where data and vectors are.
        settings (dict): The hyper-parameters.
        device (torch.device, optional): (default: :obj:`'cpu'`)
        progress (bool, optional): Show progress bars. (default: :obj:`True`)
        checkpoint (Path, optional): Where a half-finished run is kept.
        limit (int, optional): Take only so many documents of each split, for a trial.
    """
    base, _ = parse(model)
    splits = [
        DATASETS[dataset](
            str(Path(root) / dataset),
            split,
            settings['split_seed'],
            settings['max_tokens'],
        )
        for split in ('train', 'val', 'test')
    ]
    vocab, classes = splits[0].vocab, splits[0].num_classes
    vectors = load_vectors(settings['vectors'], vocab, root)
    splits = [split if limit is None else split[:limit] for split in splits]
    seed_everything(seed)
    network = make_model(base, settings, vectors.weight, dataset, classes).to(device)
    loaders = [
        DataLoader(
            split,
            batch_sampler=BucketSampler(
                [data.num_nodes for data in split],
                settings['batch_size'],
                shuffle=split is splits[0],
            ),
        )
        for split in splits
    ]
    record = fit(
        network,
        *loaders,
        loss_fn=F.mse_loss if dataset == 'mrd' else F.cross_entropy,
        score_fn=r2_score if dataset == 'mrd' else accuracy,
        progress=progress,
        desc=f'{title(model)} on {dataset}, seed {seed}',
        checkpoint=checkpoint,
        history=True,
        **{key: settings[key] for key in FIT if key in settings},
    )
    return {
        'dev': record.val_score,
        'test': record.test_score,
        'dev_loss': record.val_loss,
        'epochs': record.epochs,
        'best_epoch': record.best_epoch,
        'seconds': record.seconds,
        'iterations': record.iterations,
        'parameters': sum(p.numel() for p in network.parameters() if p.requires_grad),
        'words_with_vectors': float(vectors.found.float().mean()),
        'dev_by_epoch': [values['val_score'] for values in record.history or []],
    }


def results_file(
    dataset: str, model: str, folder: Path = RESULTS, max_tokens: int = MAX_TOKENS
) -> Path:
    """Where the runs of a pair are kept."""
    cut = '' if max_tokens == MAX_TOKENS else f'-{max_tokens}-tokens'
    return folder / 'documents' / f'{dataset}{cut}_{model}.json'


def run_seed(
    model: str,
    dataset: str,
    seed: int,
    root: str,
    settings: dict[str, Any],
    *,
    folder: Path = RESULTS,
    max_epochs: int | None = None,
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs a seed and adds it to its results file, unless it is there already."""
    file = results_file(dataset, model, folder, settings['max_tokens'])

    def stored() -> dict[str, Any]:
        content = read_json(file) or {
            'dataset': dataset,
            'system': model,
            'settings': settings,
            'documents': limit or 'all',
            'runs': [],
        }
        if content['settings'] != settings or content['documents'] != (limit or 'all'):
            raise ValueError(
                f'Expected the settings and documents that {file} was made with (got '
                f'others); move the file away, or name another folder by --results'
            )
        return content

    for known in stored()['runs']:
        if known['seed'] == seed:
            return known
    text = json.dumps([settings, limit], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f'{dataset}_{model}_{digest}_seed{seed}.pt'
    end = settings['max_epochs'] if max_epochs is None else max_epochs
    record = run(
        model,
        dataset,
        seed,
        root,
        {**settings, 'max_epochs': end},
        checkpoint=Path(root) / 'checkpoints' / 'documents' / name,
        limit=limit,
        **options,
    )
    record = {
        'seed': seed,
        **record,
        'stopped_early': record['epochs'] < end,
        'peak_memory_mb': common.peak_memory_mb(),
        'machine': common.machine(options.get('device')),
        'versions': common.versions(),
    }
    with locked(file):
        content = stored()  # Another process may have finished another seed.
        seeds = sorted({seed, *(run['seed'] for run in content['runs'])})
        content['command'] = (
            f'python benchmarks/documents.py --dataset {dataset} --model {model} '
            f'--runs {seeds[-1] - seeds[0] + 1} --first {seeds[0]}'
            + f' --max-epochs {max_epochs}' * (max_epochs is not None)
            + f' --limit {limit}' * (limit is not None)
            + f' --max-tokens {settings["max_tokens"]} --vectors {settings["vectors"]}'
        )
        content['runs'].append(record)
        write_json(file, content)
    return record


def make_table(folder: Path = RESULTS) -> str:
    """Test scores in percent beside the paper's, with what they were made with."""
    reported = read_yaml(CONFIGS / 'documents.yaml')['reported']
    columns = [(d, tokens) for d in DATASETS for tokens in (MAX_TOKENS, SHORT[d])]
    rows = []
    for model in ROWS:
        cells = []
        for dataset, tokens in columns:
            content = read_json(results_file(dataset, model, folder, tokens))
            figure = reported[model].get(dataset) if tokens == MAX_TOKENS else None
            beside = '' if figure is None else f' ({figure})'
            cells.append((cell(content) if content else '–') + beside)
        rows.append(cells)
    shown = [i for i in range(len(columns)) if any(row[i] != '–' for row in rows)]
    header = [
        SCORES[d] + f', {tokens} tokens' * (tokens != MAX_TOKENS)
        for d, tokens in columns
    ]
    lines = [
        [title(model), *(row[i] for i in shown)]
        for model, row in zip(ROWS, rows, strict=True)
    ]
    return common.table(['', *(header[i] for i in shown)], lines)


def cell(content: dict[str, Any]) -> str:
    """The scores of some runs, how many there are, and whether any was cut short."""
    runs = content['runs']
    text = percent([run['test'] for run in runs])
    if not all(run['stopped_early'] for run in runs):
        text += f', {max(run["epochs"] for run in runs)} epochs'
    return f'{text}, {len(runs)} run{"s" * (len(runs) > 1)}'


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--dataset', choices=[*DATASETS])
    parser.add_argument('--model', default='idgl', help=', '.join(ROWS))
    parser.add_argument('--runs', type=positive, default=1, help='number of seeds')
    parser.add_argument('--first', type=int, default=0, help='first seed')
    parser.add_argument('--vectors', help='a name in configs/documents.yaml')
    parser.add_argument(
        '--max-tokens', type=positive, help='cut documents there (default: 1000)'
    )
    parser.add_argument(
        '--max-epochs', type=positive, help='stop there; a killed run may be ended so'
    )
    parser.add_argument(
        '--limit', type=positive, help='documents of each split, for a trial'
    )
    parser.add_argument('--table', action='store_true', help='only show all results')
    add_options(parser)
    args = parser.parse_args(argv)
    if args.table == bool(args.dataset):
        parser.error('give either --dataset or --table')
    return args


@explain_errors
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.source:
        link_sources(Path(args.source), Path(args.root))
    if args.dataset:
        settings = load_settings(args.model, args.dataset)
        settings['vectors'] = args.vectors or settings['vectors']
        settings['max_tokens'] = args.max_tokens or settings['max_tokens']
        for seed in range(args.first, args.first + args.runs):
            record = run_seed(
                args.model,
                args.dataset,
                seed,
                args.root,
                settings,
                max_epochs=args.max_epochs,
                limit=args.limit,
                **run_options(args),
            )
            print(
                f'{title(args.model)} on {args.dataset}, seed {seed}: test '
                f'{100 * record["test"]:.1f}, dev {100 * record["dev"]:.1f}, '
                f'{record["epochs"]} epochs, {record["seconds"]:.0f} s',
                flush=True,
            )
    print(f'\n{make_table(args.results)}')
    return 0


def link_sources(source: Path, root: Path) -> None:
    """Links archives and vectors of a read-only folder to where they are looked for."""
    links = {
        f'{dataset}/raw/{file.name}': file
        for dataset in DATASETS
        for file in (source / dataset).glob('*.tar*')
    }
    for entry in read_yaml(CONFIGS / 'documents.yaml')['vectors'].values():
        links[entry['file']] = source / entry['file']
    for name, file in links.items():
        target = root / name
        if file.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file.resolve())


if __name__ == '__main__':
    sys.exit(main())
