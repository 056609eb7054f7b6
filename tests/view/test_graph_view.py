import re

import pytest
import torch
from torch_geometric.data import Batch, Data

from tests.view.common import make_data, make_trace
from torch_geometric_idgl import IDGLAnch
from torch_geometric_idgl.view import GraphView
from torch_geometric_idgl.view.__main__ import main


def test_steps_of_a_trace():
    data = make_data()
    trace = make_trace(data)
    view = GraphView.from_trace(trace, data, k=3)
    names = ['Initial graph', 'First learned graph', 'Refinement 1', 'Refinement 2']
    assert view.steps == names
    assert view.num_nodes == 12 and view.k == 3
    assert view.chance == pytest.approx(3 / 11)
    assert view.initial[0].all() and view.edges[0].size(1) == 12
    assert view.shares[0] == 0.0  # neighbours on the ring are of other classes
    first = trace.first.to_dense().fill_diagonal_(0.0)
    within = first[data.y.unsqueeze(1) == data.y].sum() / first.sum()
    assert view.shares[1] == pytest.approx(float(within))
    for pair, initial in zip(view.edges, view.initial, strict=True):
        gap = pair[1] - pair[0]
        assert torch.equal(initial, (gap == 1) | (gap == 11))
    assert not view.initial[1].all()


def test_anchors_are_shown_as_walks():
    data = make_data()
    view = GraphView.from_trace(make_trace(data, IDGLAnch, num_anchors=4), data)
    assert len(view.steps) == 4
    assert max(int(pair.max()) for pair in view.edges[1:]) > 4
    assert max(float(weight.max()) for weight in view.weights[1:]) < 1.0


@pytest.mark.parametrize('sizes', [(12, 7, 9), (12, 140, 9)])  # the second: in parts
def test_graph_of_a_batch(sizes):
    graphs = [make_data(n, seed) for seed, n in enumerate(sizes)]
    batch = Batch.from_data_list(graphs)
    trace = make_trace(batch)
    for number, data in enumerate(graphs):
        alone = GraphView.from_trace(make_trace(data), data)
        view = GraphView.from_trace(trace, batch, graph=number)
        assert view.shares == pytest.approx(alone.shares, abs=1e-5)
        assert torch.equal(view.y, data.y)
        for found, wanted in zip(view.weights, alone.weights, strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)


def test_each_graph_has_its_own_number_of_steps():
    batch = Batch.from_data_list([make_data(12), make_data(7, 1)])
    trace = make_trace(batch, tol=1e-4, max_iters=5, update_weight=0.9)
    for number, count in enumerate(trace.num_iters.tolist()):
        view = GraphView.from_trace(trace, batch, graph=number)
        assert len(view.steps) == 2 + count


def test_classes_are_optional():
    data = make_data()
    trace = make_trace(data)
    for y in [None, data.y.float(), data.y[:1], torch.full_like(data.y, -1)]:
        view = GraphView.from_trace(trace, Data(x=data.x, y=y))
        assert view.y is None and view.chance is None
        assert view.shares == [None] * 4
    assert GraphView.from_trace(trace).y is None
    assert torch.equal(GraphView.from_trace(trace, data).y, data.y)


def test_page_is_self_contained(tmp_path):
    data = make_data()
    names = ['</script><b>', '{{data}}', 'é']
    path = tmp_path / 'graph.html'
    make_trace(data).view(data, path, title='<Ring>', class_names=names)
    page = path.read_text(encoding='utf-8')
    assert '<title>&lt;Ring&gt;</title>' in page
    assert '</script><b>' not in page
    assert page.count('</script>') == 4
    assert not re.search(r'<(script|link|img)[^>]+(src|href)=', page)
    assert "default-src 'none'" in page


def test_command(tmp_path, capsys):
    data = make_data()
    trace = make_trace(data)
    run, page = tmp_path / 'run.pt', tmp_path / 'graph.html'
    trace.save(data, run, title='Ring')
    trace.view(data, page, title='Ring')
    main([str(run)])
    assert capsys.readouterr().out.strip() == str(tmp_path / 'run.html')
    assert (tmp_path / 'run.html').read_text() == page.read_text()
    main([str(run), '-o', str(page), '--title', 'Other'])
    assert '<h1>Other</h1>' in page.read_text()


@pytest.mark.parametrize(
    'content, got',
    [
        ({'model': {}, 'run': {}}, r"got a dictionary of \['model', 'run'\]"),
        ([1.0], 'got a list'),
        (make_data(), 'got a file that cannot be read'),
    ],
)
def test_command_names_what_is_wrong(content, got, tmp_path, capsys):
    run = tmp_path / 'run.pt'
    torch.save(content, run)
    with pytest.raises(SystemExit):
        main([str(run)])
    error = capsys.readouterr().err
    assert f"Expected '{run}' to be a file that 'trace.save(data, path)'" in error
    assert re.search(got, error)
    with pytest.raises(SystemExit):
        main([str(tmp_path / 'missing.pt')])
    assert 'missing.pt' in capsys.readouterr().err


def test_bad_arguments():
    data = make_data()
    trace = make_trace(data)
    for match, kwargs in [
        ("'graph' to be below the number of graphs 1", {'graph': 1}),
        ("'k' to be at least 1", {'k': 0}),
        ("'class_names' to hold at least 3 names", {'class_names': ['a']}),
        ("'node_names' to hold at least 12 names", {'node_names': ['a']}),
    ]:
        with pytest.raises(ValueError, match=match):
            GraphView.from_trace(trace, data, **kwargs)
    with pytest.raises(ValueError, match='the 12 nodes of the trace'):
        GraphView.from_trace(trace, make_data(13))
