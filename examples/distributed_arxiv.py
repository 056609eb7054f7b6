"""IDGL-Anch in several processes: on the whole graph, whose nodes are spread over them,
or on mini-batches.

    torchrun --nproc-per-node 2 examples/distributed_arxiv.py --synthetic 20000
    torchrun --nproc-per-node 2 examples/distributed_arxiv.py --mini-batch
    torchrun --nproc-per-node 2 examples/distributed_arxiv.py --features structural

With `--synthetic`, on a generated graph of so many nodes; otherwise on ogbn-arxiv, with
the paper's settings (but for the scale of the regulariser). A job that was stopped goes
on from its checkpoint if the same command is given again. It runs on CPUs, and on GPUs
where each process has one. See docs/guides/distributed.md for several machines.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.logging import log

from torch_geometric_idgl import IDGLAnch
from torch_geometric_idgl.distributed import (
    distribute,
    load_checkpoint,
    partition,
    process_group,
    same_anchors,
    save_checkpoint,
)
from torch_geometric_idgl.loader import AnchorLoader, PartitionLoader

parser = argparse.ArgumentParser()
parser.add_argument('--root', default='data', help='where the data is, or will be')
parser.add_argument('--synthetic', type=int, metavar='NODES')
parser.add_argument('--features', choices=['ogb', 'structural'], default='ogb')
parser.add_argument('--mini-batch', action='store_true')
parser.add_argument('--parts', type=int, default=20, help='of the mini-batches')
parser.add_argument('--epochs', type=int, default=100)
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--seed', type=int, default=0)
parser.add_argument('--checkpoint', default='distributed_arxiv.pt')
args = parser.parse_args()


def load_data():
    if args.synthetic is None:
        # The benchmark makes features from the graph where OGB's cannot be had.
        sys.path.append(str(Path(__file__).parents[1] / 'benchmarks'))
        from ogbn_arxiv import load_data

        return load_data(args.features, args.root)
    # Most neighbours are of the same class, and numbers of neighbours are close.
    n, generator = args.synthetic, torch.Generator().manual_seed(0)
    y = torch.arange(n) * 8 // n
    x = torch.randn(n, 32, generator=generator)
    x += F.one_hot(y * 4, 32)
    source = torch.arange(n).repeat(4)
    target = source + torch.randint(-100, 100, source.shape, generator=generator)
    edge_index = torch.stack([source, target.clamp(0, n - 1)])
    split = torch.randint(4, (n,), generator=generator)
    data = Data(x=x, edge_index=torch.cat([edge_index, edge_index.flip(0)], dim=1), y=y)
    data.train_mask, data.val_mask = split < 2, split == 2
    data.test_mask = split == 3
    return data


def make_model(data):
    small = args.synthetic is not None
    return IDGLAnch(
        data.num_features,
        hidden_channels=32 if small else 256,
        num_layers=2 if small else 3,
        out_channels=int(data.y.max()) + 1,
        dropout=0.3,
        norm='batch_norm',
        num_anchors=100 if small else 300,
        heads=1,
        epsilon=0.9,
        update_weight=0.1,
        tol=0.1,
        max_iters=2,
        smoothness=0.2,
        sparsity=0.0,
        # One fixed graph is normalised once; that of a batch is another each time.
        cached=not args.mini_batch,
    )


def train_whole(model, optimizer, shard):
    """One step on the whole graph. All ranks get the same loss."""
    mask = shard.train_mask

    def mean_loss(out):
        losses = F.cross_entropy(out[mask], shard.y[mask], reduction='none')
        return shard.mean(losses)  # over the nodes of all ranks

    optimizer.zero_grad()
    _, trace = model(shard, return_trace=True)
    loss = trace.loss(mean_loss)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train_batches(model, optimizer, loader, device):
    """One step on each batch of this rank; all ranks have as many."""
    total = 0.0
    for batch in loader:
        batch = batch.to(device)
        seeds = batch.train_mask[: batch.batch_size].nonzero().squeeze(1)
        y = batch.y[seeds]

        def mean_loss(out, seeds=seeds, y=y):  # of a batch that may have no seeds
            total = F.cross_entropy(out[seeds], y, reduction='sum')
            return total / max(seeds.numel(), 1)

        optimizer.zero_grad()
        _, trace = model(batch, return_trace=True)
        loss = trace.loss(mean_loss)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) / len(loader)
    return total


@torch.no_grad()
def test(model, shard):
    """Accuracies on the whole graph."""
    model.eval()
    right = model(shard).argmax(dim=-1) == shard.y
    names = ('train_mask', 'val_mask', 'test_mask')
    return [float(shard.mean(right[shard[name]])) for name in names]


def main(rank, world_size):
    device = torch.device('cpu')
    if torch.cuda.is_available():
        device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
        torch.cuda.set_device(device)
    data = load_data()
    seed_everything(args.seed)  # the same parts and weights on all ranks
    part = PartitionLoader(data, world_size).part  # keeps neighbours together
    shard = partition(data, rank, world_size, part).to(device)
    model = make_model(data).to(device)
    if args.mini_batch:  # The same parts on all ranks; each takes its share of them.
        sampler = DistributedSampler(range(args.parts), world_size, rank)
        loader = PartitionLoader(data, args.parts, sampler=sampler)
        loader = AnchorLoader(loader, data, same_anchors(model.draw_anchors))
    else:
        model = distribute(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    seed_everything(args.seed + rank)  # other nodes are dropped on other ranks

    free = ('root', 'epochs', 'checkpoint')  # may be others when a run goes on
    run = {key: value for key, value in vars(args).items() if key not in free}
    progress = {'epoch': 0, 'best': 0.0, 'test': 0.0}
    progress = load_checkpoint(args.checkpoint, model, optimizer, run) or progress
    for epoch in range(progress['epoch'] + 1, args.epochs + 1):
        model.train()
        if args.mini_batch:
            sampler.set_epoch(epoch)
            loss = train_batches(model, optimizer, loader, device)
        else:
            loss = train_whole(model, optimizer, shard)
        train, val, tested = test(model, shard)
        if val > progress['best']:
            progress.update(best=val, test=tested)
        progress['epoch'] = epoch
        save_checkpoint(args.checkpoint, model, optimizer, progress, run)
        if rank == 0:
            log(Epoch=epoch, Loss=loss, Train=train, Val=val, Test=progress['test'])
    if rank == 0:
        print(f'Test accuracy: {progress["test"]:.4f}')
        Path(args.checkpoint).unlink(missing_ok=True)  # it is finished


# Loading the data takes some ranks longer than others.
with process_group(timeout=60, checkpoint=args.checkpoint) as ranks:
    main(*ranks)
