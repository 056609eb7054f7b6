import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

import distributed
import pytest
import torch
from common import read_json, write_json
from torch_geometric.data import Data


def work(rank, port):
    os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    os.environ |= {'RANK': str(rank), 'WORLD_SIZE': '2'}
    return distributed.work(400, 1)


@pytest.mark.skipif(
    'fork' not in multiprocessing.get_all_start_methods(), reason='needs fork'
)
def test_bytes_of_a_step():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    with ProcessPoolExecutor(2, multiprocessing.get_context('fork')) as pool:
        row, other = pool.map(work, range(2), [port] * 2)
    assert (row['nodes'], row['ranks']) == (400, 2)
    assert row['sent_nodes'] == other['fetched_nodes']
    assert row['sum_bytes'] == other['sum_bytes'] > 0
    assert row['calls'] == other['calls'] > 0
    # The message of the first layer once; then the second layer and the outputs on
    # three graphs.
    columns = 256 + 3 * 256 + 3 * 40
    nodes = row['sent_nodes'] + row['fetched_nodes']
    assert row['sent_nodes'] > 0
    assert row['halo_bytes'] == nodes * columns * 4
    assert row['broadcast_bytes'] == 300 * 8  # the anchors


def test_parts_of_arxiv(tmp_path, monkeypatch):
    """Neighbours on a ring whose nodes are in any order are fetched less if it is cut
    into pieces.
    """
    torch.manual_seed(0)
    order = torch.randperm(64)
    ring = torch.stack([order, order.roll(1)])
    data = Data(edge_index=torch.cat([ring, ring.flip(0)], dim=1), y=order)
    monkeypatch.setattr(distributed, 'load_arxiv_graph', lambda root: data)
    out = tmp_path / 'distributed.json'
    write_json(out, {'steps': ['of before']})
    monkeypatch.setattr('sys.argv', ['', '--root', 'data', '--out', str(out)])
    distributed.main()
    content = read_json(out)
    assert content['steps'] == ['of before']
    rows = content['ogbn-arxiv']['fetched_per_node']
    assert [row['ranks'] for row in rows] == [2, 4, 8, 16]
    assert all(0 < row['grown'] < row['ranges'] for row in rows)
