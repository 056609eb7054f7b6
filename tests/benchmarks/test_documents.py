import functools
import gzip
import hashlib
import json
import shlex

import documents
import numpy as np
import pytest
import torch
from common import read_json, write_json
from documents import KNNGCN, SYSTEMS, load_settings, make_table
from torch_geometric.nn import GCNConv

from tests.datasets.common import pack
from torch_geometric_idgl.ops.knn import knn_graph

WORDS = ['the', 'ball', 'game', 'star', 'moon', 'good']  # 'bad' has no vector
MODELS = ['bilstm', 'gcn-knn', 'idgl', 'idgl-anch']
ABLATED = [f'idgl-{name}' for name in ('noil', 'noreg', 'nosmooth')]
ABLATED += ['idgl-anch-noil', 'idgl-anch-noreg']
RECORDED = {
    *['seed', 'dev', 'test', 'dev_loss', 'epochs', 'best_epoch', 'seconds'],
    *['iterations', 'parameters', 'words_with_vectors', 'dev_by_epoch'],
    *['stopped_early', 'peak_memory_mb', 'machine', 'versions'],
}


def make_source(folder):
    """Twenty posts of two groups and six for testing, and twenty reviews."""
    texts = {'rec.a': 'the ball, the game! ', 'sci.b': 'the star, the moon! '}
    news = {
        f'20news-bydate-{split}/{group}/{i}': text * (1 + i)
        for split, size in [('train', 10), ('test', 3)]
        for group, text in texts.items()
        for i in range(size)
    }
    pack(folder / '20news' / '20news-bydate.tar.gz', news)
    lines = {
        'id': [str(i) for i in range(20)],
        'rating': [str(i / 20) for i in range(20)],
        'subj': ['the good ' * i + 'the bad ' * (20 - i) for i in range(20)],
    }
    reviews = {f'scaledata/A/{k}.A': '\n'.join(lines[k]) + '\n' for k in lines}
    pack(folder / 'mrd' / 'scale_data.tar.gz', reviews)
    (folder / 'wordvec').mkdir()
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    file = folder / 'wordvec' / 'explosion.300d.filtered.npz'
    np.savez(file, words=np.array(WORDS), vectors=vectors)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """Where archives and vectors are, and where they are linked to."""
    source, root = (tmp_path_factory.mktemp(name) for name in ('source', 'root'))
    make_source(source)
    documents.stage(source, root)
    return root


@pytest.fixture
def run(data, tmp_path):
    """Runs the script; results go to a folder of the test."""

    def main(*argv, folder=tmp_path):
        argv = [*argv, '--root', str(data), '--results', str(folder), '--quiet']
        return documents.main([*argv, '--device', 'cpu'])

    return main


def content(folder, dataset, model, cut=''):
    return read_json(folder / 'documents' / f'{dataset}{cut}_{model}.json')


def without_times(record):
    timed = ('seconds', 'peak_memory_mb')
    return {key: value for key, value in record.items() if key not in timed}


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('dataset', ['20news', 'mrd'])
def test_run(run, data, tmp_path, dataset, model, capfd):
    assert run('--dataset', dataset, '--model', model, '--max-epochs', '2') == 0
    out, err = capfd.readouterr()
    assert out.startswith(f'{dataset} {model} seed 0: test ')
    assert err == ''  # no bars

    found = content(tmp_path, dataset, model)
    assert [*found] == [
        *['dataset', 'system', 'settings', 'documents', 'runs', 'command']
    ]
    assert (found['dataset'], found['system']) == (dataset, model)
    assert found['settings'] == load_settings(SYSTEMS[model], dataset)
    assert found['settings']['max_tokens'] == documents.MAX_TOKENS
    assert found['settings']['max_epochs'] == 1000  # not that of a single run
    assert found['documents'] == 'all'
    assert found['command'] == (
        f'python benchmarks/documents.py --dataset {dataset} --model {model} '
        f'--max-epochs 2 --max-tokens 1000 --vectors explosion-300d --runs 1'
    )
    (record,) = found['runs']
    assert record.keys() == RECORDED
    assert record['seed'] == 0 and record['epochs'] == 2
    assert record['stopped_early'] is False
    assert len(record['dev_by_epoch']) == 2
    assert record['dev'] == max(record['dev_by_epoch']) <= 1
    assert record['dev_by_epoch'][record['best_epoch']] == record['dev']
    words = {'20news': 5 / 6, 'mrd': 2 / 4}[dataset]  # of '<unk>', 'the', ...
    assert record['words_with_vectors'] == pytest.approx(words)
    assert (record['iterations'] is not None) == model.startswith('idgl')
    assert str(data) not in json.dumps(found)
    assert not list((data / 'checkpoints').rglob('*.pt'))


def test_ablations(run, tmp_path):
    # Without iterating there is no refinement; without regularisers the loss is that
    # of the outputs.
    argv = ['--dataset', '20news', '--max-epochs', '1', '--limit', '4', '--model']
    for model in ABLATED:
        assert run(*argv, model) == 0
        settings = content(tmp_path, '20news', model)['settings']
        assert 'first_phase' not in settings
        (record,) = content(tmp_path, '20news', model)['runs']
        if model.endswith('noil'):
            assert settings['max_iters'] == record['iterations'] == 0
        else:
            assert settings['smoothness'] == 0
            assert (settings['sparsity'] == 0) == model.endswith('noreg')
            assert record['iterations'] > 0


def test_names_of_files_stay(tmp_path, monkeypatch):
    # Runs that have been started find their files again.
    files, ends = [], []

    def fake(args, settings, seed, checkpoint):
        files.append(checkpoint)
        ends.append(settings['max_epochs'])
        record = {'test': 0.8, 'dev': 0.7, 'epochs': 3, 'seconds': 1.0}
        return {**record, 'stopped_early': True}

    monkeypatch.setattr(documents, 'run', fake)
    argv = ['--dataset', '20news', '--max-tokens', '100', '--root', str(tmp_path)]
    argv += ['--results', str(tmp_path)]
    assert documents.main(argv) == 0
    assert documents.main([*argv, '--first', '1', '--max-epochs', '7']) == 0
    settings = load_settings(SYSTEMS['idgl'], '20news', max_tokens=100)
    text = json.dumps([settings, None], sort_keys=True)
    name = f'20news_idgl_{hashlib.sha256(text.encode()).hexdigest()[:8]}'
    folder = tmp_path / 'checkpoints' / 'documents'
    assert files == [folder / f'{name}_seed{seed}.pt' for seed in (0, 1)]
    file = tmp_path / 'documents' / '20news-100-tokens_idgl.json'
    found = read_json(file)
    assert [run['seed'] for run in found['runs']] == [0, 1]
    assert ends == [1000, 7]
    assert '--max-epochs 7 --max-tokens 100 ' in found['command']
    assert found['command'].endswith(' --runs 2')
    # A trial has a checkpoint of its own.
    other = ['--limit', '2', '--results', str(tmp_path / 'other')]
    assert documents.main([*argv, *other]) == 0
    assert files[2] != files[0]


def test_finished_seeds_are_not_run_again(run, tmp_path, monkeypatch, capsys):
    argv = ['--dataset', 'mrd', '--model', 'bilstm', '--max-epochs', '1']
    assert run(*argv) == 0
    seeds = []
    again = documents.run

    def spy(args, settings, seed, checkpoint):
        seeds.append(seed)
        return again(args, settings, seed, checkpoint)

    monkeypatch.setattr(documents, 'run', spy)
    before = content(tmp_path, 'mrd', 'bilstm')['runs']
    capsys.readouterr()
    assert run(*argv, '--runs', '2') == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(' (stored, not run)') for line in lines[:2]] == [True, False]
    assert seeds == [1]
    found = content(tmp_path, 'mrd', 'bilstm')
    assert found['runs'][:1] == before
    assert [record['seed'] for record in found['runs']] == [0, 1]
    assert found['command'].endswith(' --runs 2')
    # Seeds are different runs.
    assert found['runs'][0]['dev_loss'] != found['runs'][1]['dev_loss']


@pytest.mark.parametrize('model', MODELS)
def test_killed_run_goes_on(run, data, tmp_path, monkeypatch, model):
    argv = ['--dataset', '20news', '--model', model, '--limit', '5']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    assert run(*argv, '--max-epochs', '3', folder=whole) == 0
    epochs = []
    fit = documents.fit

    def stop(epoch, values):
        epochs.append(epoch)
        if epochs == [0, 1]:
            raise KeyboardInterrupt

    def stopping(*args, **kwargs):
        return fit(*args, callback=stop, **kwargs)

    monkeypatch.setattr(documents, 'fit', stopping)
    with pytest.raises(KeyboardInterrupt):
        run(*argv, '--max-epochs', '3', folder=parts)
    assert len(list((data / 'checkpoints').rglob('*.pt'))) == 1
    assert content(parts, '20news', model) is None
    assert run(*argv, '--max-epochs', '3', folder=parts) == 0
    assert epochs == [0, 1, 2]
    (first,), (second,) = (
        content(folder, '20news', model)['runs'] for folder in (whole, parts)
    )
    assert without_times(second) == without_times(first)
    assert not list((data / 'checkpoints').rglob('*.pt'))


def test_killed_run_is_ended_early(run, tmp_path, monkeypatch):
    argv = ['--dataset', 'mrd', '--model', 'bilstm']
    fit = documents.fit

    def stop(epoch, values):
        if epoch == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(documents, 'fit', lambda *a, **k: fit(*a, callback=stop, **k))
        with pytest.raises(KeyboardInterrupt):
            run(*argv)
    # No epoch is run any more: the best one of those there are is tested.
    monkeypatch.setattr(
        documents, 'fit', lambda *a, **k: fit(*a, callback=pytest.fail, **k)
    )
    assert run(*argv, '--max-epochs', '1') == 0
    (record,) = content(tmp_path, 'mrd', 'bilstm')['runs']
    assert record['epochs'] == 3 and not record['stopped_early']


def test_patience(run, tmp_path, monkeypatch):
    settings = documents.load_settings

    def short(*args, **kwargs):
        return {**settings(*args, **kwargs), 'patience': 1}

    monkeypatch.setattr(documents, 'load_settings', short)
    assert run('--dataset', '20news', '--model', 'bilstm') == 0
    (record,) = content(tmp_path, '20news', 'bilstm')['runs']
    assert record['stopped_early'] is True
    assert record['epochs'] == record['best_epoch'] + 2


def test_limit(run, tmp_path, monkeypatch):
    sizes = []
    fit = documents.fit

    def spy(network, *loaders, **kwargs):
        sizes.append([len(loader.dataset) for loader in loaders])
        return fit(network, *loaders, **kwargs)

    monkeypatch.setattr(documents, 'fit', spy)
    argv = ['--dataset', '20news', '--model', 'bilstm', '--max-epochs', '1']
    assert run(*argv, '--limit', '5') == 0
    assert run(*argv, folder=tmp_path / 'all') == 0
    assert sizes == [[5, 6, 6], [14, 6, 6]]  # dev and test documents are all
    found = content(tmp_path, '20news', 'bilstm')
    assert found['documents'] == 5 and ' --limit 5 ' in found['command']


def test_max_tokens(run, tmp_path, monkeypatch):
    longest = []
    fit = documents.fit

    def spy(network, *loaders, **kwargs):
        longest.append(max(data.num_nodes for data in loaders[0].dataset))
        return fit(network, *loaders, **kwargs)

    monkeypatch.setattr(documents, 'fit', spy)
    argv = ['--dataset', '20news', '--model', 'gcn-knn', '--max-epochs', '1']
    assert run(*argv, '--max-tokens', '7') == 0
    assert longest == [7]
    assert (tmp_path / 'documents' / '20news-7-tokens_gcn-knn.json').exists()
    found = content(tmp_path, '20news', 'gcn-knn', cut='-7-tokens')
    assert found['settings']['max_tokens'] == 7
    assert ' --max-tokens 7 ' in found['command']


def test_other_settings_are_refused(run, tmp_path, capsys):
    argv = ['--dataset', 'mrd', '--model', 'bilstm', '--max-epochs', '1']
    assert run(*argv, '--limit', '3') == 0
    file = tmp_path / 'documents' / 'mrd_bilstm.json'
    before = file.read_bytes()
    for options, changed in [
        ([], "{'documents': (3, 'all')}"),
        (['--limit', '4'], "{'documents': (3, 4)}"),
        (
            ['--limit', '3', '--vectors', 'glove-6b-100d'],
            "{'vectors': ('explosion-300d', 'glove-6b-100d')}",
        ),
    ]:
        assert run(*argv, *options) == 1
        err = capsys.readouterr().err
        assert 'Expected the settings that mrd_bilstm.json was made with' in err
        assert changed in err and "another folder by '--results'" in err
    assert file.read_bytes() == before


def test_settings_that_change_meanwhile(tmp_path, monkeypatch, capsys):
    file = tmp_path / 'documents' / 'mrd_bilstm.json'

    def fake(args, settings, seed, checkpoint):
        about = {'settings': {**settings, 'lr': 7.0}, 'documents': 'all', 'runs': []}
        write_json(file, about)
        return {'test': 0.8, 'dev': 0.7, 'epochs': 3, 'seconds': 1.0}

    monkeypatch.setattr(documents, 'run', fake)
    argv = ['--dataset', 'mrd', '--model', 'bilstm', '--results', str(tmp_path)]
    assert documents.main([*argv, '--root', str(tmp_path)]) == 1
    assert "'lr': (7.0, 0.001)" in capsys.readouterr().err
    assert read_json(file)['runs'] == []


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--vectors', 'glove-6b-100d'], 'glove/glove.100d.20news-mrd.txt.gz'),
        (['--source', 'nowhere'], "nowhere' to read data from"),
    ],
)
def test_errors_are_explained(run, tmp_path, argv, message, capsys):
    assert run('--dataset', '20news', *argv) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob('*.json'))


@pytest.mark.parametrize(
    ('option', 'name', 'known'),
    [
        ('--model', 'gin', ['bilstm', 'gcn-knn', 'idgl', 'idgl-anch-noil']),
        ('--model', 'idgl-tuned', ['idgl-noreg']),
        ('--vectors', 'word2vec', ['explosion-300d', 'glove-840b-300d']),
    ],
)
def test_unknown_names(option, name, known, capsys):
    with pytest.raises(SystemExit):
        documents.main(['--dataset', '20news', option, name])
    err = capsys.readouterr().err
    assert f"argument {option}: invalid choice: '{name}'" in err
    assert all(other in err.partition('choose from')[2] for other in known)


def test_missing_archive_is_explained(data, tmp_path, capsys):
    (tmp_path / 'wordvec').symlink_to(data / 'wordvec')
    argv = ['--dataset', 'mrd', '--root', str(tmp_path), '--results', str(tmp_path)]
    assert documents.main(argv) == 1
    err = capsys.readouterr().err
    assert f"not in '{tmp_path / 'mrd' / 'raw'}'" in err
    assert 'Put the file scale_data.tar.gz' in err


@pytest.mark.parametrize(
    'argv', [[], ['--table', '--dataset', 'mrd'], ['--dataset', 'mrd', '--limit', '0']]
)
def test_contradictory_options(argv, capsys):
    with pytest.raises(SystemExit):
        documents.main(argv)
    assert 'error: ' in capsys.readouterr().err


def test_source(tmp_path):
    make_source(tmp_path / 'source')
    root = tmp_path / 'root'
    for _ in range(2):
        documents.stage(tmp_path / 'source', root)
        assert (root / '20news' / 'raw' / '20news-bydate.tar.gz').is_symlink()
        assert (root / 'mrd' / 'raw' / 'scale_data.tar.gz').is_symlink()
        assert (root / 'wordvec' / 'explosion.300d.filtered.npz').is_symlink()
    assert not (root / 'glove').exists()  # there is none to link


def test_lengths_of_vectors(data, tmp_path):
    weight, found = documents.load_vectors('explosion-300d', ['<unk>', *WORDS], data)
    assert weight.norm(dim=1).allclose(torch.tensor(6.0))
    assert found.tolist() == [False] + 6 * [True]
    # Those without a length stay as they are.
    (tmp_path / 'glove').mkdir()
    file = tmp_path / 'glove' / 'glove.100d.20news-mrd.txt.gz'
    file.write_bytes(gzip.compress(b'the 1 2 3\ngood 4 5 6\n'))
    weight, _ = documents.load_vectors('glove-6b-100d', ['good', 'the'], tmp_path)
    assert weight.tolist() == [[4, 5, 6], [1, 2, 3]]


# GCN on kNN graphs


@pytest.mark.parametrize('k', [1, 5, 60, 400])
@pytest.mark.parametrize(
    'sizes', [[9], [200], [3, 20, 1, 150, 17, 0, 16, 300, 128, 5], [140, 2, 130, 60]]
)
def test_knn_gcn(sizes, k):
    torch.manual_seed(k)
    model = KNNGCN(6, num_layers=2, dropout=0.5, k=k).double().eval()
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    n = batch.numel()
    x, words = torch.randn(2, n, 6, dtype=torch.double)
    edge_index = knn_graph(words, k, batch)
    weight = batch.bincount()[batch[edge_index[0]]].clamp(max=k).double().reciprocal()
    convs = [GCNConv(6, 6, normalize=False, bias=False).double() for _ in range(2)]
    weights = [w for w in model.parameters() if w.dim() == 2]
    for conv, own in zip(convs, weights, strict=True):
        conv.lin.weight = own
    expected = convs[1](convs[0](x, edge_index, weight).relu(), edge_index, weight)
    out = model(x, batch=batch, batch_size=len(sizes), graph_x=words)
    assert torch.allclose(out, expected, atol=1e-12)

    grads = [torch.autograd.grad(y.square().sum(), weights) for y in (out, expected)]
    for own, other in zip(*grads, strict=True):
        assert torch.allclose(own, other)


def test_knn_gcn_dropout():
    torch.manual_seed(0)
    model = KNNGCN(6, num_layers=2, dropout=0.5, k=3)
    x, words = torch.randn(2, 12, 6)
    batch = torch.tensor([0] * 5 + [1] * 7)
    inputs = {'batch': batch, 'batch_size': 2, 'graph_x': words}
    assert not model(x, **inputs).equal(model(x, **inputs))
    model.eval()
    assert model(x, **inputs).equal(model(x, **inputs))


# The table


def write_result(folder, dataset, model, scores, documents='all', epochs=20, **changed):
    settings = load_settings(SYSTEMS[model], dataset) | changed
    stopped = epochs == 20
    runs = [
        {'seed': i, 'test': score, 'epochs': epochs, 'stopped_early': stopped}
        for i, score in enumerate(scores)
    ]
    cut = f'-{changed["max_tokens"]}-tokens' if 'max_tokens' in changed else ''
    file = folder / 'documents' / f'{dataset}{cut}_{model}.json'
    about = {'dataset': dataset, 'system': model, 'documents': documents}
    write_json(file, {**about, 'settings': settings, 'runs': runs})


def cells(markdown, row):
    """The cells of a row by the heads of their columns."""
    lines = [
        [part.strip() for part in line.strip('|').split('|')]
        for line in markdown.splitlines()
    ]
    (found,) = [line for line in lines if line[0] == row]
    return dict(zip(lines[0][1:], found[1:], strict=True))


def test_table(tmp_path, capsys):
    news, mrd = '20News accuracy (1000 tokens)', 'Movie reviews R² (1000 tokens)'
    short = '20News accuracy (100 tokens)'
    write_result(tmp_path, '20news', 'idgl', [0.8, 0.82, 0.8, 0.82, 0.81])
    write_result(tmp_path, '20news', 'bilstm', [0.7], max_tokens=100)
    write_result(tmp_path, '20news', 'gcn-knn', [0.7], max_tokens=100, lr=7.0)
    write_result(tmp_path, 'mrd', 'idgl', [0.6, 0.5], epochs=12)
    write_result(tmp_path, 'mrd', 'bilstm', [0.4] * 5, documents=50)
    write_result(tmp_path, 'mrd', 'gcn-knn', [-0.1] * 5, vectors='glove-6b-100d')
    assert documents.main(['--table', '--results', str(tmp_path)]) == 0
    out = capsys.readouterr().out
    markdown = make_table(tmp_path)
    assert out == f'{markdown}\n'
    assert cells(markdown, 'IDGL w/o IL') == {news: '(83.0)', short: '–', mrd: '–'}
    assert cells(markdown, 'IDGL') == {
        news: '81.0 ± 1.0 (83.6)',
        short: '–',
        mrd: '55.0 ± 7.1, 2 runs, 12 epochs at most (63.7)',
    }
    assert cells(markdown, 'BiLSTM') == {
        news: '(80.0)',
        short: '70.0, 1 run',  # no figure of the paper beside
        mrd: '40.0 ± 0.0, 50 training documents (53.1)',
    }
    assert cells(markdown, 'GCN-kNN') == {
        news: '(81.3)',
        short: '70.0, 1 run, with other settings',
        mrd: '-10.0 ± 0.0, glove-6b-100d (60.1)',
    }


def test_commands_of_results_are_understood(run, tmp_path):
    argv = ['--dataset', '20news', '--model', 'bilstm', '--max-epochs', '1']
    assert run(*argv, '--limit', '2', '--first', '3') == 0
    command = content(tmp_path, '20news', 'bilstm')['command']
    args = documents.parse_args(shlex.split(command)[2:])
    assert (args.dataset, args.model, args.first, args.runs) == (
        *('20news', 'bilstm', 3, 1),
    )
    assert (args.limit, args.max_epochs, args.max_tokens) == (2, 1, 1000)


def test_a_part_of_an_epoch_can_be_timed(data, monkeypatch):
    import speed

    part, methods, make = speed.CASES['newsgroups']
    case = (part, methods, functools.partial(make, every=1))
    monkeypatch.setitem(speed.CASES, 'newsgroups', case)
    assert speed.run('newsgroups', 'idgl', root=str(data))['seconds'] > 0


def test_missing_word_vectors_are_named(tmp_path):
    name = load_settings(SYSTEMS['idgl'], '20news')['vectors']
    message = rf"There is no file '.*' of the word vectors '{name}'; put it there"
    with pytest.raises(FileNotFoundError, match=message):
        documents.load_vectors(name, ['word'], str(tmp_path))
