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
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RESULTS, machine, peak_memory_mb, read_json, versions, write_json
from torch.nn.parallel import DistributedDataParallel
from torch_geometric import seed_everything
from torch_geometric.data import Data

from torch_geometric_idgl import IDGLAnch
from torch_geometric_idgl.datasets.load import load_arxiv_graph
from torch_geometric_idgl.distributed import distribute, partition, process_group
from torch_geometric_idgl.loader import PartitionLoader

SETTINGS: dict[str, Any] = {
    'hidden_channels': 256,
    'num_layers': 3,
    'out_channels': 40,
    'dropout': 0.3,
    'norm': 'batch_norm',
    'num_anchors': 300,
    'heads': 1,
    'epsilon': 0.9,
    'initial_weight': 0.8,
    'update_weight': 0.1,
    'smoothness': 0.2,
    'sparsity': 0.0,
    'tol': None,  # two refinements, whatever comes
    'max_iters': 2,
}
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


def count_bytes(world_size: int) -> Counter:
    """Counts what this rank sends from now on, by kind."""
    sent: Counter = Counter()
    shares = {
        'all_reduce': (0, 2 * (world_size - 1) / world_size),
        'all_to_all_single': (1, 1.0),
        'broadcast': (0, min(world_size - 1, 1)),
    }
    for name, (place, share) in shares.items():
        fn = getattr(dist, name)

        def counted(*args, fn=fn, name=name, place=place, share=share, **kwargs):
            sent[name] += share * args[place].numel() * args[place].element_size()
            sent[f'calls of {name}'] += 1
            return fn(*args, **kwargs)

        setattr(dist, name, functools.wraps(fn)(counted))
    return sent


def work(n: int, steps: int, out: Path) -> None:
    with process_group(timeout=600) as (rank, world_size):
        sent = count_bytes(world_size)
        shard = partition(make_data(n), rank, world_size)
        start_mb = peak_memory_mb()
        seed_everything(0)
        model = IDGLAnch(NUM_FEATURES, **SETTINGS, cached=True)
        model = DistributedDataParallel(distribute(model))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mask, y = shard.train_mask, shard.y[shard.train_mask]
        seconds, cpu_seconds = [], []
        for _ in range(1 + steps):  # The first one makes what is kept.
            sent.clear()
            start, cpu_start = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            _, trace = model(shard, return_trace=True)
            loss = trace.loss(
                lambda out: shard.mean(F.cross_entropy(out[mask], y, reduction='none'))
            )
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        weights = 4 * sum(p.numel() for p in model.parameters())
        row = {
            'nodes': n,
            'ranks': world_size,
            'seconds': round(median(seconds[1:]), 3),
            'cpu_seconds': round(median(cpu_seconds[1:]), 3),
            'start_mb': start_mb,
            'peak_mb': peak_memory_mb(),
            # Features of the first are sent forwards, gradients of the second back.
            'sent_nodes': trace.initial.halo.wanted.numel(),
            'fetched_nodes': sum(trace.initial.halo.sizes),
            'halo_bytes': int(sent['all_to_all_single']),
            'sum_bytes': int(sent['all_reduce']),
            'broadcast_bytes': int(sent['broadcast']),
            'weight_bytes': int(weights * 2 * (world_size - 1) / world_size),
            'calls': sum(sent[key] for key in sent if key.startswith('calls')),
        }
        if rank == 0:
            write_json(out, row)


def halo_of_arxiv(root: str) -> list[dict[str, Any]]:
    """How many nodes of others a rank fetches for each of its own, on average, with
    ranges of nodes as parts, and with parts that grow along edges.
    """
    data = load_arxiv_graph(root)
    data.x = torch.zeros(data.y.numel(), 1)
    rows = []
    for ranks in (2, 4, 8, 16):
        row: dict[str, Any] = {'ranks': ranks}
        seed_everything(0)
        grown = PartitionLoader(data, ranks).part
        for name, part in (('ranges', None), ('grown', grown)):
            shards = (partition(data, rank, ranks, part) for rank in range(ranks))
            halo = sum(shard.adj_t.halo_index.numel() for shard in shards)
            row[name] = round(halo / data.y.numel(), 3)
        rows.append(row)
    return rows


def measure(n: int, ranks: int, steps: int, out: Path) -> dict[str, Any]:
    command = [sys.executable]
    if ranks > 1:
        command += ['-m', 'torch.distributed.run', '--standalone']
        command += ['--nproc-per-node', str(ranks)]
    command += [__file__, '--sizes', str(n), '--steps', str(steps)]
    subprocess.run([*command, '--work', '--out', str(out)], check=True)
    row = read_json(out)
    out.unlink()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--sizes', type=int, nargs='+', default=[10_000, 40_000])
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--steps', type=int, default=3)
    parser.add_argument('--root', help='the data, to look at ogbn-arxiv alone')
    parser.add_argument('--out', type=Path, default=RESULTS / 'distributed.json')
    parser.add_argument('--work', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.sizes[0], args.steps, args.out)
        return
    content: dict[str, Any] = read_json(args.out) or {}
    if args.root:
        parts = halo_of_arxiv(args.root)
        command = 'python benchmarks/distributed.py --root ROOT'
        made = {'command': command, 'versions': versions(), 'fetched_per_node': parts}
        write_json(args.out, {**content, 'ogbn-arxiv': made})
        return
    content |= {
        'command': 'python benchmarks/distributed.py',
        'arguments': {key: getattr(args, key) for key in ('sizes', 'ranks', 'steps')},
        'versions': versions(),
        'machine': machine(),
        'settings': {'num_features': NUM_FEATURES, **SETTINGS},
        'steps': [],
    }
    temp = args.out.with_suffix('.row.json')
    for n in args.sizes:
        for ranks in args.ranks:
            row = measure(n, ranks, args.steps, temp)
            print(row, flush=True)
            content['steps'].append(row)
    write_json(args.out, content)


if __name__ == '__main__':
    main()
