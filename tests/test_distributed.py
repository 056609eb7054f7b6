"""Several processes on one machine, against one process."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from torch_geometric_idgl import IDGL, IDGLAnch
from torch_geometric_idgl.distributed import (
    NodeShard,
    ShardBatchNorm,
    all_sum,
    distribute,
    load_checkpoint,
    partition,
    process_group,
    same_anchors,
    save_checkpoint,
)
from torch_geometric_idgl.nn import OperatorConv
from torch_geometric_idgl.training import fit

pytestmark = pytest.mark.skipif(
    'fork' not in multiprocessing.get_all_start_methods(), reason='needs fork'
)

NUM_NODES = 23
ALL_TERMS = {'smoothness': 0.3, 'connectivity': 0.2, 'sparsity': 0.4}

CASES = {
    'low rank': {},
    'dense': {'backend': 'dense', 'epsilon': 0.3},
    'sparse': {'backend': 'sparse', 'epsilon': 0.8},
    'tiled': {'backend': 'tiled', 'epsilon': 0.3},
    'automatic': {'epsilon': 0.9},
    'negative on one rank': {'negative': True},
    'batch norm': {'norm': 'batch_norm', 'num_layers': 3},
    'layer norm': {'norm': 'layer_norm', 'norm_kwargs': {'mode': 'node'}},
    'sage': {'backbone': 'sage', 'bias': True},
    'gin': {'backbone': 'gin', 'norm': 'batch_norm'},
    'appnp': {'backbone': 'appnp'},
    'one layer': {'num_layers': 1},
    'jumping knowledge': {'jk': 'cat', 'norm': 'batch_norm'},
    'rbf': {'metric': 'rbf'},
    'attention': {'metric': 'attention', 'top_k': 3},
    'smoothness only': {'sparsity': 0.0, 'connectivity': 0.0},
    'smoothness of many anchors': {'sparsity': 0.0, 'epsilon': 0.2, 'anchors': 8},
    'paper': {'scale_regularizer': False},
    'weighted, not normalised': {'normalize': False, 'weights': True},
    'weighted, without loops': {'add_self_loops': False, 'weights': True},
    'any parts': {'weights': True, 'any_parts': True},
    'cached': {'cached': True},
    'recomputed': {'checkpoint_iters': True, 'norm': 'batch_norm'},
    'fixed anchors': {'anchor_sampling': 'fixed', 'anchors': None},
}

# All of them with two ranks, and these with three.
WITH_THREE = ('low rank', 'sparse', 'batch norm', 'gin', 'any parts')


def make_data(negative=False, weights=False):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(NUM_NODES, 6, generator=generator, dtype=torch.double)
    if negative:
        x[0, 0] = -0.5
    edge_index = torch.randint(NUM_NODES, (2, 70), generator=generator)
    data = Data(x=x, edge_index=edge_index)
    data.y = torch.randint(3, (NUM_NODES,), generator=generator)
    data.train_mask = torch.arange(NUM_NODES) < 9  # none on the last rank of three
    if weights:
        data.edge_weight = torch.rand(70, generator=generator, dtype=torch.double)
    return data


def make_case(name):
    options = {**ALL_TERMS, 'num_layers': 2, 'max_iters': 3, 'tol': 1e-3}
    options |= {'num_anchors': 5, 'out_channels': 3, **CASES[name]}
    data = make_data(options.pop('negative', False), options.pop('weights', False))
    anchors = options.pop('anchors', 5)
    index = None if anchors is None else torch.arange(anchors) * 2 + 1
    any_parts = options.pop('any_parts', False)
    torch.manual_seed(3)
    model = IDGLAnch(6, 8, **options).double()
    return model, data, index, any_parts


def result(model, data, index, mean, gather):
    mask = data.train_mask
    out, trace = model(data, anchor_index=index, return_trace=True)
    loss = trace.loss(
        lambda out: mean(F.cross_entropy(out[mask], data.y[mask], reduction='none'))
    )
    loss.backward()
    bare = getattr(model, 'module', model)
    found = {f'grad of {key}': p.grad for key, p in bare.named_parameters()}
    found |= {key: buffer for key, buffer in bare.named_buffers()}
    found |= {'loss': loss.detach(), 'out': gather(out.detach())}
    found |= {'first out': gather(trace.outs[0].detach())}
    found |= {f'delta {t}': delta for t, delta in enumerate(trace.deltas)}
    found['num_iters'] = trace.num_iters
    with torch.no_grad():
        found['evaluated'] = gather(bare.eval()(data))
    return found


def all_cases(rank, world_size):
    found = {}
    for name in CASES if world_size == 2 else WITH_THREE:
        model, data, index, any_parts = make_case(name)
        part = torch.arange(NUM_NODES) * 7 % world_size if any_parts else None
        shard = partition(data, rank, world_size, part)
        model = DistributedDataParallel(distribute(model))
        found[name] = result(model, shard, index, shard.mean, shard.gather)
    return found


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def _run(fn, rank, world_size, port, file, timeout=60):
    torch.set_num_threads(1)
    os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    os.environ |= {'RANK': str(rank), 'WORLD_SIZE': str(world_size)}
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
    with process_group('gloo', timeout) as (rank, world_size):
        found = fn(rank, world_size)
    torch.save(found, f'{file}.{rank}')


def run_ranks(fn, world_size, tmp_path):
    """What a function gives on each rank."""
    context = multiprocessing.get_context('fork')
    port, file = free_port(), tmp_path / 'found'
    ranks = [
        context.Process(target=_run, args=(fn, rank, world_size, port, file))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * world_size
    return [torch.load(f'{file}.{rank}') for rank in range(world_size)]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp('ranks')
    return {
        world_size: run_ranks(all_cases, world_size, folder) for world_size in (2, 3)
    }


@pytest.mark.parametrize(
    'world_size, name',
    [*((2, name) for name in CASES), *((3, name) for name in WITH_THREE)],
)
def test_same_as_one_process(found, world_size, name):
    model, data, index, _ = make_case(name)
    expected = result(model, data, index, torch.mean, lambda rows: rows)
    assert int(expected['num_iters']) == 2  # it has stopped before the third
    for rank in found[world_size]:
        assert rank[name].keys() == expected.keys()
        for key, value in expected.items():
            close = torch.allclose(rank[name][key], value, rtol=1e-10, atol=1e-10)
            assert close, (key, rank[name][key], value)


# Random numbers, batches, phases, small helpers: all in one start of the ranks --------


def batches():
    """Three batches that are graphs of their own: one rank gets two of them."""
    data = make_data()
    nodes = torch.arange(NUM_NODES)
    return [data.subgraph(nodes[start::3]) for start in range(3)]


def batch_loss(model, batch):
    _, trace = model(batch, return_trace=True)
    return trace.loss(lambda out: F.cross_entropy(out, batch.y))


def small_model(**kwargs):
    torch.manual_seed(3)
    kwargs = {'out_channels': 3, 'num_anchors': 5, 'max_iters': 2, **kwargs}
    return IDGLAnch(6, 8, 2, **kwargs).double()


def other_things(rank, world_size):
    found = {}
    data = make_data()
    shard = partition(data, rank, world_size)
    mask = shard.train_mask

    def losses(out):
        return shard.mean(F.cross_entropy(out[mask], shard.y[mask], reduction='none'))

    # Own random numbers on each rank, but the same anchors, and the same ones dropped.
    drops = {'graph_dropout': 0.5, 'dropout': 0.5, 'feature_dropout': 0.2}
    model = distribute(small_model(**drops, cached=True))
    torch.manual_seed(rank)
    _, trace = model(shard, return_trace=True)
    found['dropped'] = trace.loss(losses).detach()
    with pytest.raises(ValueError, match='nodes are all in this process'):
        trace.mixed.to_edges()
    assert trace.learned.to_dense().shape == (shard.num_nodes, 5)

    # A phase without refinements leaves parameters unused.
    model = DistributedDataParallel(
        distribute(small_model()), find_unused_parameters=True
    )
    for max_iters in (0, 2):
        _, trace = model(shard, max_iters=max_iters, return_trace=True)
        trace.loss(losses).backward()
    found['phases'] = {key: p.grad for key, p in model.module.named_parameters()}

    # Mini-batches: ordinary models on batches, one rank with more of them.
    model = DistributedDataParallel(small_model(anchor_sampling='fixed'))
    found['batches'] = []
    with model.join():
        for batch in batches()[rank::world_size]:
            model.zero_grad()
            batch_loss(model, batch).backward()
            found['batches'].append([p.grad for p in model.parameters()])

    draw = small_model().draw_anchors
    torch.manual_seed(rank)
    found['anchors'] = [draw(NUM_NODES), same_anchors(draw)(NUM_NODES)]

    found['mean'] = shard.mean(torch.arange(NUM_NODES)[shard.node_index] > 5)
    found['gathered'] = shard.gather(shard.y)
    found['sum'] = all_sum(torch.tensor([rank + 1.0]))
    return found


def test_other_things(tmp_path):
    first, second = run_ranks(other_things, 2, tmp_path)
    assert torch.equal(first['dropped'], second['dropped'])

    for index, same in enumerate((False, True)):
        pair = [found['anchors'][index] for found in (first, second)]
        assert torch.equal(*pair) == same

    data = make_data()
    for key in ('mean', 'gathered', 'sum'):
        assert torch.equal(first[key], second[key])
    assert float(first['mean']) == pytest.approx((NUM_NODES - 6) / NUM_NODES)
    assert torch.equal(first['gathered'], data.y)
    assert first['sum'].tolist() == [3.0]
    for key, grad in first['phases'].items():
        assert torch.equal(grad, second['phases'][key]) and bool(grad.any()), key

    model = small_model(anchor_sampling='fixed')
    grads = []
    for batch in batches():
        model.zero_grad()
        batch_loss(model, batch).backward()
        grads.append([p.grad for p in model.parameters()])
    one, two, three = grads
    # Averages of two batches, and of one and nothing.
    for found, mine, other in zip(first['batches'][0], one, two, strict=True):
        assert torch.allclose(found, (mine + other) / 2, rtol=1e-10, atol=1e-12)
    for found, mine in zip(first['batches'][1], three, strict=True):
        assert torch.allclose(found, mine / 2, rtol=1e-10, atol=1e-12)
    assert len(second['batches']) == 1


# Failures ----------------------------------------------------------------------------

EPOCHS = 5


def train(rank, world_size, checkpoint, killed_in=None):
    shard = partition(make_data(), rank, world_size)
    mask = shard.train_mask
    model = small_model(norm='batch_norm', dropout=0.5, graph_dropout=0.2)
    model = DistributedDataParallel(distribute(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    progress = load_checkpoint(checkpoint, model, optimizer) or {'losses': []}
    for epoch in range(len(progress['losses']), EPOCHS):
        optimizer.zero_grad()
        _, trace = model(shard, return_trace=True)
        loss = trace.loss(
            lambda out: shard.mean(
                F.cross_entropy(out[mask], shard.y[mask], reduction='none')
            )
        )
        if epoch == killed_in and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        progress['losses'].append(float(loss.detach()))
        save_checkpoint(checkpoint, model, optimizer, progress)
    return progress['losses'], model.module.state_dict()


SCRIPT = """
import sys
from tests.test_distributed import process_group, train
with process_group('gloo', checkpoint=sys.argv[1]) as ranks:
    train(*ranks, sys.argv[1], killed_in=3)
"""


def torchrun(script, *args):
    """A script in two processes, as they are started in practice."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2']
    command += ['--master-port', str(free_port()), str(script), *map(str, args)]
    root = str(Path(__file__).parents[1])
    env = {**os.environ, 'PYTHONPATH': root, 'OMP_NUM_THREADS': '1'}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )


SUMS = """
import torch
from torch_geometric_idgl.distributed import all_sum, process_group
with process_group('gloo') as (rank, world_size):
    x = torch.ones(1000)
    for _ in range(50):
        x = all_sum(x) / world_size
"""


def test_ends_well():
    """Threads that still hold tensors must not end the process their own way."""
    for _ in range(3):
        env = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'WORLD_SIZE': '2'}
        env |= {'MASTER_PORT': str(free_port()), 'OMP_NUM_THREADS': '1'}
        env['PYTHONPATH'] = str(Path(__file__).parents[1])
        command = [sys.executable, '-c', SUMS]
        ranks = [subprocess.Popen(command, env={**env, 'RANK': str(i)}) for i in (0, 1)]
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]


@pytest.mark.parametrize('mini_batch', [False, True])
def test_example_in_two_processes(tmp_path, mini_batch):
    script = Path(__file__).parents[1] / 'examples' / 'distributed_arxiv.py'
    options = ['--synthetic', 400, '--epochs', 2, '--checkpoint', tmp_path / 'run.pt']
    job = torchrun(script, *options, *['--mini-batch'] * mini_batch)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count('Epoch: ') == 2
    assert re.search(r'Test accuracy: 0\.\d+', job.stdout)


def test_goes_on_after_a_rank_was_killed(tmp_path):
    file = tmp_path / 'run.pt'
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    job = torchrun(script, file)
    assert job.returncode != 0
    assert time.time() - file.stat().st_mtime < 60  # since the last checkpoint
    assert (
        f'Rank 0 of 2 has stopped: rank 1 no longer answers. Start the same command '
        f"again, which goes on from '{file}'" in job.stderr
    )
    assert re.search(r'Signal 9 \(SIGKILL\)', job.stderr)
    assert len(torch.load(file, weights_only=True)['progress']['losses']) == 3

    def run(checkpoint):
        return run_ranks(lambda *ranks: train(*ranks, checkpoint), 2, tmp_path)

    continued, whole = run(file), run(tmp_path / 'other.pt')
    assert len(whole[0][0]) == EPOCHS
    for rank in (0, 1):
        assert continued[rank][0] == whole[rank][0]
        for key, value in whole[rank][1].items():
            assert torch.equal(continued[rank][1][key], value), key


def messages(fn, timeout, tmp_path, count=1):
    """What the errors of two ranks say; so many of them are waited for."""
    context = multiprocessing.get_context('fork')
    port, said = free_port(), context.Queue()

    def run(rank):
        try:
            _run(fn, rank, 2, port, tmp_path / 'none', timeout)
        except Exception as error:
            said.put((rank, str(error)))
            time.sleep(1)  # Rank 0 has the notes, which the other may be reading.

    ranks = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(said.get(timeout=60) for _ in range(count))
    ranks[0].join()
    ranks[1].kill()
    while not said.empty():
        found |= [said.get()]
    return found


def test_says_what_another_rank_has_raised(tmp_path):
    def fn(rank, world_size):
        if rank == 1:
            raise KeyError('a mistake')
        all_sum(torch.ones(1))

    found = messages(fn, 30, tmp_path)
    assert found[1] == "'a mistake'"
    assert found[0] == (
        "Rank 0 of 2 has stopped: rank 1 has raised KeyError: 'a mistake'. Start the "
        'same command again'
    )


def test_says_that_a_rank_was_told_to_stop(tmp_path):
    def fn(rank, world_size):
        all_sum(torch.ones(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        all_sum(torch.ones(1))

    found = messages(fn, 30, tmp_path, count=2)
    told = 'was told to stop (SIGTERM). Start the same command again'
    assert found[0] == f'Rank 0 of 2 has stopped: rank 1 {told}'
    assert found[1] == f'Rank 1 of 2 has stopped: it {told}'


def test_says_that_all_ranks_live(tmp_path):
    """They wait for each other, in calls that do not fit."""

    def fn(rank, world_size):
        all_sum(torch.ones(1))
        if rank == 0:
            all_sum(torch.ones(1))
        else:
            torch.distributed.recv(torch.ones(1), 0)

    found = messages(fn, 3, tmp_path, count=2)
    for rank in (0, 1):
        assert found[rank].startswith(f'Rank {rank} of 2 has stopped: all ranks live')


def test_does_not_wait_for_a_rank_for_ever(tmp_path):
    def fn(rank, world_size):
        all_sum(torch.ones(1))
        if rank == 1:
            time.sleep(60)
        all_sum(torch.ones(1))

    found = messages(fn, 3, tmp_path)
    assert found[0].startswith('Rank 0 of 2 has stopped: rank 1 no longer answers.')


def test_does_without_the_rank_that_has_the_notes(tmp_path):
    """Without `torchrun`, rank 0 keeps what the others write down when they end."""

    def fn(rank, world_size):
        all_sum(torch.ones(1))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        all_sum(torch.ones(1))

    found = messages(fn, 30, tmp_path)
    assert found[1].startswith('Rank 1 of 2 has stopped: rank 0 no longer answers.')


def wrong_number_of_ranks(rank, world_size, file):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    assert load_checkpoint(file.with_name('none.pt'), model, optimizer) is None
    save_checkpoint(file, model, optimizer, {'epoch': 1})
    assert load_checkpoint(file, model, optimizer) == {'epoch': 1}
    content = torch.load(file, weights_only=True)
    torch.save({**content, 'run': {'world_size': 7}}, file)
    with pytest.raises(ValueError, match='of 1 ranks'):
        load_checkpoint(file, model, optimizer)
    save_checkpoint(file, model, optimizer, {'epoch': 1}, {'lr': 0.1})
    assert load_checkpoint(file, model, optimizer, {'lr': 0.1}) == {'epoch': 1}
    for other in ({'lr': 0.2}, None):
        with pytest.raises(ValueError, match=r"settings .*got one with {'lr': 0.1}"):
            load_checkpoint(file, model, optimizer, other)


def test_checkpoint_of_another_number_of_ranks(tmp_path):
    file = tmp_path / 'run.pt'
    run_ranks(lambda *ranks: wrong_number_of_ranks(*ranks, file), 1, tmp_path)


# What needs no ranks -----------------------------------------------------------------


def test_partition():
    data = make_data(weights=True)
    data.name = 'kept'
    data.edge_attr = torch.ones(70, 1)
    shards = [partition(data, rank, 3) for rank in range(3)]
    assert [shard.num_nodes for shard in shards] == [8, 8, 7]
    assert torch.equal(torch.cat([shard.x for shard in shards]), data.x)
    assert torch.equal(
        torch.cat([shard.node_index for shard in shards]), torch.arange(23)
    )
    assert sum(shard.adj_t.row.numel() for shard in shards) == 70
    assert shards[1].name == 'kept' and 'edge_attr' not in shards[1]
    assert shards[1].num_total == 23
    assert str(shards[1].adj_t).startswith('ShardAdjacency([8, 23], nnz=')
    sparse = Data(x=data.x.to_sparse(), edge_index=data.edge_index)
    assert torch.equal(partition(sparse, 1, 3).x, shards[1].x)


def test_shards_can_be_saved(tmp_path):
    shard = partition(make_data(), 0, 2)
    torch.save(shard, tmp_path / 'shard.pt')
    again = torch.load(tmp_path / 'shard.pt', weights_only=False)
    assert isinstance(again, NodeShard)
    assert torch.equal(again.x, shard.x)
    assert torch.equal(again.adj_t.col, shard.adj_t.col)


def test_partition_says_what_is_wrong():
    data = make_data()
    with pytest.raises(ValueError, match="'rank' to be below 2"):
        partition(data, 2, 2)
    with pytest.raises(ValueError, match='every rank to own at least one node'):
        partition(data, 0, 2, torch.zeros(NUM_NODES, dtype=torch.long))
    with pytest.raises(ValueError, match='ranks from 0 to 1'):
        partition(data, 0, 2, torch.arange(NUM_NODES))
    with pytest.raises(ValueError, match='rank of each of the 23 nodes'):
        partition(data, 0, 2, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match='hold a graph'):
        partition(Data(x=data.x), 0, 2)
    with pytest.raises(ValueError, match="node features 'x'"):
        partition(Data(edge_index=data.edge_index), 0, 2)


def test_distribute_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match="'IDGLAnch'"):
        distribute(IDGL(6, 8, 2))
    with pytest.raises(ValueError, match='all edges in one process'):
        distribute(IDGLAnch(6, 8, 2, backbone=GraphConv))
    with pytest.raises(ValueError, match='layer normalisation of single nodes'):
        distribute(IDGLAnch(6, 8, 2, norm='layer_norm'))


def test_shards_are_for_models_that_can_do_with_them():
    shard = partition(make_data(), 0, 2)
    with pytest.raises(TypeError, match=r"'IDGLAnch' .*got 'IDGL'"):
        IDGL(6, 8, 2).double()(shard)
    with pytest.raises(RuntimeError, match=r"'distribute' .*BatchNorm"):
        small_model(norm='batch_norm')(shard)
    with pytest.raises(ValueError, match='layer normalisation of single nodes'):
        small_model(norm='graph_norm').eval()(shard)
    with pytest.raises(TypeError, match=r'whole graph .got the nodes of one rank'):
        fit(small_model(), shard)
    with pytest.raises(ValueError, match=r'whole graph .got nodes of one rank'):
        small_model().eval().inference(shard)


def test_names_of_parameters_stay():
    model = IDGLAnch(6, 8, 2, norm='batch_norm')
    names = list(model.state_dict())
    assert list(distribute(model).state_dict()) == names


class NormedLayer(OperatorConv):
    """A layer with a norm of its own."""

    def __init__(self, in_channels, out_channels, norm=torch.nn.BatchNorm1d):
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels)
        self.norm = norm(out_channels)

    def project(self, x):
        return x.matmul(self.lin.weight.t())

    def finish(self, aggregated, projected):
        return self.norm(aggregated)


def test_norms_within_layers_are_over_all_ranks():
    model = distribute(IDGLAnch(3, 4, 2, 2, backbone=NormedLayer, num_anchors=3))
    norms = [conv.norm for conv in model.backbone.convs]
    assert all(type(norm) is ShardBatchNorm for norm in norms)
    assert distribute(model) is model  # once more

    def layer(i, o):
        return NormedLayer(i, o, torch.nn.InstanceNorm1d)

    with pytest.raises(ValueError, match=r'BatchNorm1d.*got InstanceNorm1d'):
        distribute(IDGLAnch(3, 4, 2, 2, backbone=layer, num_anchors=3))


def test_process_group_can_be_entered_again():
    for _ in range(2):
        with pytest.raises(RuntimeError, match='boom'), process_group('gloo'):
            raise RuntimeError('boom')
    with process_group('gloo') as (rank, world_size):
        assert (rank, world_size) == (0, 1)


def test_gather_wants_a_row_for_each_node():
    shard = partition(make_data(), 0, 2)
    with pytest.raises(ValueError, match=r"'rows' .*got shape \[1, 3\]"):
        shard.gather(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="'rows' to be a tensor"):
        shard.gather([1, 2])
    for part, error in [([0, 1], TypeError), (torch.ones(2) > 0, ValueError)]:
        with pytest.raises(error, match="Expected 'part'"):
            partition(make_data(), 0, 2, part)
