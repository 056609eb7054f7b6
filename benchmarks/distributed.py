"""Seconds and bytes of a step in several processes, on generated graphs.

    python benchmarks/distributed.py --sizes 10000 40000 --ranks 1 2
    python benchmarks/distributed.py --root data    # only the parts of ogbn-arxiv

The model has the paper's settings for ogbn-arxiv, with two refinements in every step;
the graph has as many edges for each node. Bytes are those that a rank hands to its
collectives: of a sum over ranks, what a ring sends, 2 (W - 1) / W times its size. With
`--root`, it counts how many nodes of others a rank of ogbn-arxiv fetches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import torch.distributed as dist
from common import CONFIGS, RESULTS, peak_memory_mb, read_json, read_yaml, write_json
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel
from torch_geometric import seed_everything
from torch_geometric.data import Data

from torch_geometric_idgl import IDGLAnch
from torch_geometric_idgl.datasets.load import load_arxiv_graph
from torch_geometric_idgl.distributed import distribute, partition, process_group
from torch_geometric_idgl.loader import PartitionLoader

KEYS = ('hidden_channels', 'num_layers', 'dropout', 'norm', 'num_anchors', 'heads')
KEYS += ('epsilon', 'initial_weight', 'update_weight', 'smoothness', 'sparsity')
PAPER = read_yaml(CONFIGS / 'paper.yaml')['idgl-anch']['ogbn-arxiv']
SETTINGS: dict[str, Any] = {key: PAPER[key] for key in KEYS}
SETTINGS |= {'out_channels': 40, 'tol': None, 'max_iters': 2}  # always two refinements
NUM_FEATURES = 128
NUM_NEIGHBOURS = 14  # of ogbn-arxiv, both directions


def make_data(n: int) -> Data:
    """Neighbours are near in number, so that ranges of nodes are good parts."""
    generator = torch.Generator().manual_seed(0)
    source = torch.arange(n).repeat(NUM_NEIGHBOURS // 2)
    step = torch.randint(1, max(n // 50, 2), source.shape, generator=generator)
    edge_index = torch.stack([source, (source + step) % n])
    data = Data(x=torch.randn(n, NUM_FEATURES, generator=generator))
    data.edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    data.y = torch.randint(40, (n,), generator=generator)
    data.train_mask = torch.rand(n, generator=generator) < 0.54
    return data


def counted(sent: Counter, name: str, share: float, fn: Callable, *args, **kwargs):
    """Calls a collective, and adds what this rank sends."""
    sent['calls'] += 1
    sent[name] += share * args[name == 'all_to_all_single'].nbytes
    return fn(*args, **kwargs)


def work(n: int, steps: int) -> dict[str, Any]:
    """The work of a rank, of one thread; a row of the results."""
    torch.set_num_threads(1)
    with process_group(timeout=600) as (rank, world_size):
        sent, ring = Counter(), 2 * (world_size - 1) / world_size
        once = min(world_size - 1, 1)  # not at all without other ranks
        shares = {'all_reduce': ring, 'all_to_all_single': 1, 'broadcast': once}
        for name, share in shares.items():
            fn = getattr(dist, name)
            setattr(dist, name, functools.partial(counted, sent, name, share, fn))
        shard = partition(make_data(n), rank, world_size)
        start_mb = peak_memory_mb()
        seed_everything(0)
        model = IDGLAnch(NUM_FEATURES, **SETTINGS, cached=True)
        model = DistributedDataParallel(distribute(model))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loss = torch.nn.CrossEntropyLoss(reduction='none')
        mask, y = shard.train_mask, shard.y[shard.train_mask]
        times = []
        for _ in range(1 + steps):  # The first one makes what is kept.
            sent.clear()
            start, cpu_start = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            _, trace = model(shard, return_trace=True)
            trace.loss(lambda out: shard.mean(loss(out[mask], y))).backward()
            optimizer.step()
            times.append((time.perf_counter() - start, time.process_time() - cpu_start))
        medians = [round(median(t), 3) for t in zip(*times[1:], strict=True)]
        row = {'nodes': n, 'ranks': world_size, 'seconds': medians[0]}
        row |= {'cpu_seconds': medians[1], 'start_mb': start_mb}
        # Features of the first are sent forwards, gradients of the second back.
        halo = trace.initial.halo
        row |= {'peak_mb': peak_memory_mb(), 'sent_nodes': halo.wanted.numel()}
        row |= {'fetched_nodes': sum(halo.sizes), 'calls': sent['calls']}
        row['halo_bytes'] = int(sent['all_to_all_single'])
        row['sum_bytes'] = int(sent['all_reduce'])
        row['broadcast_bytes'] = int(sent['broadcast'])
        row['weight_bytes'] = int(ring * sum(p.nbytes for p in model.parameters()))
        return row


def halo_of_arxiv(root: str) -> list[dict[str, Any]]:
    """How many nodes of others a rank fetches for each of its own, on average, with
    ranges of nodes as parts, and with parts that grow along edges.
    """
    data = load_arxiv_graph(root)
    data.x = torch.zeros(data.y.numel(), 1)
    rows = []
    for ranks in (2, 4, 8, 16):
        seed_everything(0)
        row: dict[str, Any] = {'ranks': ranks}
        parts = {'ranges': None, 'grown': PartitionLoader(data, ranks).part}
        for name, part in parts.items():
            shards = (partition(data, rank, ranks, part) for rank in range(ranks))
            halo = sum(shard.adj_t.halo_index.numel() for shard in shards)
            row[name] = round(halo / data.y.numel(), 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--sizes', type=int, nargs='+', default=[10_000, 40_000])
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--steps', type=int, default=3)
    parser.add_argument('--root', help='the data, to look at ogbn-arxiv alone')
    parser.add_argument('--out', type=Path, default=RESULTS / 'distributed.json')
    args = parser.parse_args()
    content: dict[str, Any] = read_json(args.out) or {}
    command = 'python benchmarks/distributed.py'
    if args.root:
        made = {'command': f'{command} --root ROOT', 'versions': common.versions()}
        made['fetched_per_node'] = halo_of_arxiv(args.root)
        write_json(args.out, {**content, 'ogbn-arxiv': made})
        return
    asked = {key: getattr(args, key) for key in ('sizes', 'ranks', 'steps')}
    content |= {'command': command, 'arguments': asked, 'versions': common.versions()}
    content |= {'machine': {**common.machine(), 'threads': 1}, 'steps': []}
    content['settings'] = {'num_features': NUM_FEATURES, **SETTINGS}
    for n, ranks in itertools.product(args.sizes, args.ranks):
        place = {'rdzv_backend': 'c10d', 'rdzv_endpoint': 'localhost:0'}
        config = LaunchConfig(1, 1, ranks, run_id=f'{n}-{ranks}', **place)
        row = elastic_launch(config, work)(n, args.steps)[0]
        print(row, flush=True)
        content['steps'].append(row)
    write_json(args.out, content)


if __name__ == '__main__':
    main()
