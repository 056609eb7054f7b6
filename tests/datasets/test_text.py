import json
import shutil
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.loader import DataLoader

from tests.datasets.common import pack
from torch_geometric_idgl.datasets import (
    MovieReviews,
    NewsGroups20,
    build_vocab,
    encode,
    read_text_folder,
    text,
    tokenize,
)

# Ten posts of two groups for training, and three for testing.
NEWS = {
    f'20news-bydate-train/{group}/{i}': f'post{group[-1]}{i}, the the {group}!'
    for group in ('rec.a', 'sci.b')
    for i in range(5)
} | {
    '20news-bydate-test/sci.b/7': 'The tested word',
    '20news-bydate-test/rec.a/8': '... -- !',
    '20news-bydate-test/rec.a/9': 'new words only',
}
# Ten reviews of two authors.
REVIEWS = {
    'scaledata.README.1.0.txt': 'About this data',
    'scaledata/A+B/id.A+B': '9\n10\n3\n4\n',
    'scaledata/A+B/rating.A+B': '0.1\n0.2\n0.25\n1\n',
    'scaledata/A+B/subj.A+B': 'bad , bad\nnot good\n\ngood\n',
    'scaledata/A+B/label.3class.A+B': '0\n0\n0\n2\n',
    'scaledata/C/id.C': '1\n2\n3\n4\n5\n6\n',
    'scaledata/C/rating.C': '0\n.5\n.5\n.5\n.5\n.75\n',
    'scaledata/C/subj.C': 'a\nb\nc\nd\ne\nf\n',
}
SPLITS = ['train', 'val', 'test']


def unpack(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.fixture
def news(tmp_path):
    pack(tmp_path / 'raw' / '20news-bydate.tar.gz', NEWS)
    return tmp_path


@pytest.fixture
def reviews(tmp_path):
    pack(tmp_path / 'raw' / 'scale_data.tar.gz', REVIEWS)
    return tmp_path


def read(cls, root, **kwargs):
    """The words and targets of all splits."""
    kwargs = {'min_count': 1, 'log': False, **kwargs}
    datasets = {split: cls(root, split, **kwargs) for split in SPLITS}
    return {
        split: [
            (' '.join(dataset.vocab[i] for i in data.token.tolist()), data.y.tolist())
            for data in dataset
        ]
        for split, dataset in datasets.items()
    }


def test_tokenize():
    assert tokenize("Don't stop_me:\n NOW, (état)--\t#1!") == [
        *['don', 't', 'stop', 'me', 'now', 'état', '1']
    ]
    assert tokenize(' ... \n') == []


def test_build_vocab():
    documents = [['b', 'a', 'c'], ['b', 'a', 'd'], ['b'], ['<unk>'] * 9]
    assert build_vocab(documents, min_count=1) == ['<unk>', 'b', 'a', 'c', 'd']
    assert build_vocab(iter(documents), min_count=2) == ['<unk>', 'b', 'a']
    assert build_vocab(documents, max_words=3, min_count=1) == ['<unk>', 'b', 'a', 'c']
    assert build_vocab([]) == ['<unk>']
    for name in ['max_words', 'min_count']:
        with pytest.raises(ValueError, match=rf"'{name}' to be at least 1 \(got 0\)"):
            build_vocab(documents, **{name: 0})


def test_encode():
    vocab = ['<unk>', 'b', 'a']
    tokens = encode([['a', 'b', 'x', 'a'], [], ['y', 'z']], vocab)
    assert [token.tolist() for token in tokens] == [[2, 1, 0, 2], [0], [0, 0]]
    assert all(token.dtype == torch.long for token in tokens)
    for wrong in [[], ['a', '<unk>']]:
        with pytest.raises(ValueError, match="'vocab' to begin with '<unk>'"):
            encode([['a']], wrong)


def test_read_text_folder(tmp_path):
    files = {'b/2.txt': 'two', 'b/10.txt': 'ten', 'a/x.txt': 'x', 'README.md': 'About'}
    unpack(tmp_path / 'texts', files | {'a/.y.txt': 'hidden', 'a/z.html': 'page'})
    expected = (['x', 'ten', 'two'], [0, 1, 1], ['a', 'b'])
    assert read_text_folder(tmp_path / 'texts') == expected
    assert read_text_folder(pack(tmp_path / 'texts.tar.xz', files)) == expected
    assert read_text_folder(str(tmp_path / 'texts'), '.html') == (['page'], [0], ['a'])
    (tmp_path / 'texts/a/x.txt').write_bytes(
        b'caf\xe9 \xc3\xa9'
    )  # The first is no UTF-8.
    assert read_text_folder(tmp_path / 'texts')[0][0] == 'caf é'


def test_read_text_folder_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_text_folder(tmp_path / 'nothing')
    with pytest.raises(ValueError, match=r"files 'CLASS/FILE.txt' in .* \(got none\)"):
        read_text_folder(tmp_path)
    unpack(tmp_path, {'a/b/c.txt': 'too deep'})
    with pytest.raises(ValueError, match=r"\(got 'a/b/c.txt'\)"):
        read_text_folder(tmp_path)


def test_news_groups(news):
    state = torch.get_rng_state()
    dataset = NewsGroups20(news, min_count=1, log=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(dataset) == "NewsGroups20(7, split='train')"
    assert str(dataset[:2]) == "NewsGroups20(2, split='train')"
    assert dataset.class_names == ['rec.a', 'sci.b'] and dataset.num_classes == 2
    assert dataset.vocab[:2] == ['<unk>', 'the']
    data = dataset[0]
    assert data.token.dtype == torch.long and data.num_nodes == data.token.numel() == 5
    assert data.edge_index is None

    splits = read(NewsGroups20, news)
    assert [len(splits[split]) for split in SPLITS] == [7, 3, 3]
    for words, label in splits['train']:
        group = 'ab'[label[0]]
        assert words.startswith(f'post{group}') and words.endswith(f' {group}')
    # The vocabulary is that of the training split.
    assert all(words.startswith('<unk> the the') for words, _ in splits['val'])
    assert splits['test'] == [
        ('<unk>', [0]),  # No words at all.
        ('<unk> <unk> <unk>', [0]),
        ('the <unk> <unk>', [1]),
    ]

    batch = next(iter(DataLoader(dataset, batch_size=4)))
    assert batch.batch.bincount().tolist() == [5] * 4
    assert F.cross_entropy(torch.zeros(4, 2), batch.y).isfinite()


def test_movie_reviews(reviews):
    dataset = MovieReviews(str(reviews), min_count=1, log=False)
    assert str(dataset) == "MovieReviews(6, split='train')"
    assert dataset.num_classes == 1
    splits = read(MovieReviews, reviews)
    assert [len(splits[split]) for split in SPLITS] == [6, 2, 2]
    every = [review for split in SPLITS for review in splits[split]]
    assert sorted(y[0][0] for _, y in every) == [
        *[0, pytest.approx(0.1), pytest.approx(0.2), 0.25, 0.5, 0.5, 0.5, 0.5, 0.75, 1]
    ]
    expected = {0.25: '<unk>', 0.75: 'f', 1: 'good', 0: 'a'}
    for words, y in splits['train']:
        assert words == expected.get(y[0][0], words)

    batch = next(iter(DataLoader(dataset, batch_size=3)))
    assert batch.y.size() == (3, 1) and batch.y.dtype == torch.float
    assert F.mse_loss(torch.zeros(3, 1), batch.y) > 0


def test_max_tokens(news):
    dataset = NewsGroups20(news, max_tokens=2, max_words=4, min_count=1, log=False)
    assert [data.num_nodes for data in dataset] == [2] * 7
    # Words are counted in whole texts: four of 'sci.b' and three of 'rec.a'.
    assert dataset.vocab == ['<unk>', 'the', 'b', 'sci', 'a']


def test_seeds(news, reviews):
    # Both are in the same folder.
    for cls in [NewsGroups20, MovieReviews]:
        first, same, other = (
            read(cls, news, seed=seed, force_reload=i == 1)
            for i, seed in enumerate([1234, 1234, 3])
        )
        assert first == same == read(cls, news)
        assert first['train'] != other['train']


@pytest.mark.parametrize('suffix', ['.tgz', '.tar.xz', '.tar', ''])
@pytest.mark.parametrize(
    ('cls', 'stem', 'files'),
    [(NewsGroups20, '20news-bydate', NEWS), (MovieReviews, 'scale_data', REVIEWS)],
)
def test_order_and_format_of_archive(tmp_path, cls, stem, files, suffix):
    pack(tmp_path / 'first' / 'raw' / f'{stem}.tar.gz', files)
    backwards = {f'./{name}': files[name] for name in reversed(files)}
    if suffix:
        backwards['./._junk'] = 'of another system'
        pack(tmp_path / 'second' / 'raw' / f'{stem}_v1.0{suffix}', backwards)
    else:
        unpack(tmp_path / 'second' / 'raw', backwards)
        unpack(tmp_path / 'third' / 'raw' / f'{stem}-all', backwards)
        assert read(cls, tmp_path / 'first') == read(cls, tmp_path / 'third')
    assert read(cls, tmp_path / 'first') == read(cls, tmp_path / 'second')


def test_order_of_reviews(tmp_path):
    pack(tmp_path / 'first' / 'raw' / 'scale_data.tar', REVIEWS)
    backwards = {
        name: content
        if name.endswith('.txt')
        else '\n'.join(content.removesuffix('\n').split('\n')[::-1]) + '\r\n'
        for name, content in REVIEWS.items()
    }
    pack(tmp_path / 'second' / 'raw' / 'scale_data.tar', backwards)
    first, second = (
        read(MovieReviews, tmp_path / name) for name in ['first', 'second']
    )
    assert first == second


def test_processed_files(news):
    before = read(NewsGroups20, news)
    shutil.rmtree(news / 'raw')
    assert read(NewsGroups20, news) == before
    assert not (news / 'raw').exists()
    # Other options have files of their own, which are not there yet.
    names = {'train.pt', 'val.pt', 'test.pt', 'vocab.json'}
    (folder,) = (news / 'processed').iterdir()
    assert names <= {path.name for path in folder.iterdir()}
    for options in [
        {'seed': 1},
        {'max_tokens': 999},
        {'max_words': 9999},
        {'min_count': 2},
        {'force_reload': True},
    ]:
        with pytest.raises(FileNotFoundError):
            NewsGroups20(news, log=False, **{'min_count': 1, **options})


def test_interrupted_processing(news, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(json, 'dump', interrupt)
        with pytest.raises(KeyboardInterrupt):
            NewsGroups20(news, log=False)
    (folder,) = (news / 'processed').iterdir()
    assert list(folder.iterdir()) == []
    assert len(NewsGroups20(news, log=False)) == 7


def test_transforms(news):
    def mark(data):
        data.marked = True
        return data

    dataset = NewsGroups20(
        news,
        'test',
        transform=mark,
        pre_transform=lambda data: data.update({'length': data.num_nodes}),
        pre_filter=lambda data: data.num_nodes > 1,
        log=False,
    )
    assert [data.length for data in dataset] == [3, 3]
    assert dataset[0].marked and dataset.num_classes == 2
    with pytest.raises(ValueError, match="'pre_filter' to keep a document of 'train'"):
        NewsGroups20(news, seed=1, pre_filter=lambda data: False, log=False)


@pytest.mark.parametrize('log', [True, False])
def test_progress(news, capfd, log):
    NewsGroups20(news, log=log)
    assert ('Processing train split: 100%' in capfd.readouterr().err) == log


@pytest.mark.parametrize(
    ('cls', 'files', 'name'),
    [
        (NewsGroups20, NEWS, '20news-bydate.tar.gz'),
        (MovieReviews, REVIEWS, 'scale_data.tar.gz'),
    ],
)
def test_download(tmp_path, monkeypatch, cls, files, name):
    def download_url(url, folder, log):
        urls.append(url)
        return str(pack(Path(folder, url.rpartition('/')[2]), files))

    urls = []
    monkeypatch.setattr(text, 'download_url', download_url)
    for split in SPLITS:
        assert len(cls(tmp_path, split, log=False)) > 0
    assert urls == [cls.url]
    assert [path.name for path in (tmp_path / 'raw').iterdir()] == [name]
    cls(tmp_path, seed=1, log=False)
    assert len(urls) == 1


def test_download_without_network(tmp_path):
    with pytest.raises(FileNotFoundError) as e:
        NewsGroups20(tmp_path, log=False)
    assert f"20 Newsgroups data is not in '{tmp_path / 'raw'}'" in str(e.value)
    assert str(e.value).endswith(
        f'Put the file 20news-bydate.tar.gz ({NewsGroups20.url}) there'
    )
    assert isinstance(e.value.__cause__, URLError)
    assert list(tmp_path.rglob('*')) == [tmp_path / 'raw']


@pytest.mark.parametrize('error', [None, KeyboardInterrupt])
def test_download_cut_short(tmp_path, monkeypatch, error):
    def download_url(url, folder, log):
        path = pack(Path(folder, 'scale_data.tar.gz'), REVIEWS)
        path.write_bytes(path.read_bytes()[:-20])
        if error is not None:
            raise error
        return str(path)

    monkeypatch.setattr(text, 'download_url', download_url)
    match = None if error else r'could not be downloaded \(ValueError: .*EOFError'
    with pytest.raises(error or FileNotFoundError, match=match):
        MovieReviews(tmp_path, log=False)
    assert list(tmp_path.rglob('*')) == [tmp_path / 'raw']


@pytest.mark.parametrize('suffix', ['.tar', '.tar.gz', '.tar.xz'])
def test_damaged_archive(tmp_path, suffix):
    path = pack(tmp_path / 'raw' / f'20news-bydate{suffix}', NEWS)
    content = path.read_bytes()
    # Files take two blocks of 512 bytes in a plain archive: this is cut between two of
    # them, in the head of a file, and in its text.
    size = 512 * 8 if suffix == '.tar' else len(content) // 2
    cut = [size, size + 3, size + 515 if suffix == '.tar' else -1, 4]
    for damaged in [*(content[:end] for end in cut), b'<html>' * 99]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"Cannot read the archive '{path}'"):
            NewsGroups20(tmp_path, log=False)
    path.write_bytes(content)
    assert len(NewsGroups20(tmp_path, log=False)) == 7


def test_damage_within_an_archive(tmp_path):
    path = pack(tmp_path / 'raw' / '20news-bydate.tar', NEWS)
    content = bytearray(path.read_bytes())
    content[512 * 4 + 10] ^= 255  # In the name of the third file.
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"Cannot read .* at '{[*NEWS][1]}' \(EOF"):
        NewsGroups20(tmp_path, log=False)


def test_wrong_checksum(tmp_path):
    path = pack(tmp_path / 'raw' / '20news-bydate.tar.gz', NEWS)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ValueError, match=f"Cannot read the archive '{path}'"):
        NewsGroups20(tmp_path, log=False)


def test_wrong_layout_of_news(tmp_path):
    path = tmp_path / 'raw' / '20news-bydate.tar'
    pack(path, {name: NEWS[name] for name in NEWS if 'train' in name})
    with pytest.raises(ValueError, match=rf"-test/GROUP/ID' in '{path}' \(got none\)"):
        NewsGroups20(tmp_path, log=False)
    pack(path, NEWS | {'20news-bydate-train/x': 'No group'})
    with pytest.raises(ValueError, match=rf"GROUP/ID' in '{path}' \(got 'x'\)"):
        NewsGroups20(tmp_path, log=False)
    pack(path, {name: NEWS[name] for name in NEWS if 'test' in name or name[-1] == '0'})
    assert len(NewsGroups20(tmp_path, log=False)) == 1
    pack(path, {name: NEWS[name] for name in NEWS if 'test' in name or 'b/0' in name})
    with pytest.raises(ValueError, match=r"for a 'train' split .*\(got 4 documents"):
        NewsGroups20(tmp_path, seed=1, log=False)
    pack(path.with_suffix('.tgz'), NEWS)
    with pytest.raises(
        ValueError, match=r"one archive .*bydate.tar', '20news-bydate.t"
    ):
        NewsGroups20(tmp_path, seed=1, log=False)


@pytest.mark.parametrize(
    ('change', 'error'),
    [
        ({'rating.C': '0\n.5\n'}, r"'rating.C' in .* 6 lines, .*'id.C' .*\(got 2\)"),
        ({'subj.C': 'a\nb\n'}, r"'subj.C' in .* 6 lines, .*'id.C' .*\(got 2\)"),
        ({'rating.C': '0\n.5\n.\n1\n1\n1'}, r"line 3 of 'rating.C' in .*\(got '.'\)"),
        ({'rating.C': '0\n7\n1\n1\n1\n1'}, r"line 2 of 'rating.C' in .*\(got '7'\)"),
        ({'rating.C': 'nan\n1\n1\n1\n1\n1'}, r"line 1 of 'rating.C' .*\(got 'nan'\)"),
        ({'subj.C': None}, "the file 'scaledata/C/subj.C' in '.*scale_data.tar'"),
    ],
)
def test_wrong_reviews(tmp_path, change, error):
    files = REVIEWS | {f'scaledata/C/{name}': change[name] for name in change}
    files = {name: files[name] for name in files if files[name] is not None}
    pack(tmp_path / 'raw' / 'scale_data.tar', files)
    with pytest.raises(ValueError, match=error):
        MovieReviews(tmp_path, log=False)


def test_no_reviews(tmp_path):
    pack(tmp_path / 'raw' / 'scale_data.tar', {'scaledata.README.txt': 'Nothing else'})
    with pytest.raises(ValueError, match=r"'scaledata/AUTHOR/.*\(got none\)"):
        MovieReviews(tmp_path, log=False)


def test_wrong_arguments(news):
    with pytest.raises(ValueError, match=r"'split' to be one of .*\(got 'dev'\)"):
        NewsGroups20(news, 'dev')
    for name in ['max_tokens', 'max_words', 'min_count']:
        with pytest.raises(ValueError, match=rf"'{name}' to be at least 1 \(got 0\)"):
            MovieReviews(news, **{name: 0})
    with pytest.raises(TypeError, match=r"'seed' to be an integer \(got None\)"):
        NewsGroups20(news, seed=None)


@pytest.mark.parametrize(
    ('cls', 'archive', 'sizes', 'num_words', 'num_tokens'),
    [
        (
            NewsGroups20,
            '20news/20news-bydate.tar.xz',
            [7919, 3395, 7532],
            10_000,
            4_869_379,
        ),
        (
            MovieReviews,
            'mrd/scale_data_v1.0.tar.xz',
            [3003, 1001, 1002],
            7805,
            1_943_878,
        ),
    ],
)
def test_real_data(data_source, tmp_path, cls, archive, sizes, num_words, num_tokens):
    file = data_source / archive
    if not file.exists():
        pytest.skip(f"needs the real data, but '{file}' is not there")
    (tmp_path / 'raw').mkdir()
    (tmp_path / 'raw' / file.name).symlink_to(file)
    datasets = [cls(tmp_path, split, log=False) for split in SPLITS]
    assert [len(dataset) for dataset in datasets] == sizes
    assert len(datasets[0].vocab) == num_words + 1
    assert sum(dataset.token.numel() for dataset in datasets) == num_tokens
    assert max(data.num_nodes for data in datasets[0]) == 1000
    y = torch.cat([dataset.y for dataset in datasets])
    if cls is NewsGroups20:
        assert datasets[0].num_classes == 20
        assert [int(dataset.y.max()) for dataset in datasets] == [19] * 3
    else:
        assert float(y.mean()) == pytest.approx(0.5814, abs=5e-5)


def test_texts_are_not_lists_of_words():
    for call in (build_vocab, lambda texts: encode(texts, ['<unk>'])):
        with pytest.raises(TypeError, match=r"lists of words.*'hello world'"):
            call(['hello world'])


def test_byte_order_marks_are_no_words(tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / '1.txt').write_bytes(b'\xef\xbb\xbfHello world')
    texts, _, _ = read_text_folder(tmp_path)
    assert tokenize(texts[0]) == ['hello', 'world']


def test_archive_of_the_folder_or_of_what_is_in_it(tmp_path):
    files = {'pos/1.txt': 'good', 'neg/1.txt': 'bad'}
    inner = read_text_folder(pack(tmp_path / 'inner.tar', files))
    outer = {f'reviews/{name}': text for name, text in files.items()}
    assert read_text_folder(pack(tmp_path / 'outer.tar.gz', outer)) == inner
    assert inner == (['bad', 'good'], [0, 1], ['neg', 'pos'])
