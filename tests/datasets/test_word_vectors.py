import gzip

import numpy as np
import pytest
import torch

from torch_geometric_idgl.datasets import load_word_vectors

LINES = ['the 1 2 3', 'cat -1 0.5 1e-1', 'dog 0 4 2']
VOCAB = ['<unk>', 'dog', 'bird', 'the', 'cat']
KNOWN = torch.tensor([[0, 4, 2], [1, 2, 3], [-1, 0.5, 0.1]])  # dog, the, cat


def write(path, lines):
    content = '\n'.join(lines).encode() + b'\n'
    path.write_bytes(gzip.compress(content) if path.suffix == '.gz' else content)
    return path


def write_npz(path, **arrays):
    words = np.array(['the', 'dog', 'cat'])
    vectors = KNOWN[[1, 0, 2]].numpy()
    arrays = {'words': words, 'vectors': vectors} | arrays
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def check(vectors):
    assert vectors.found.tolist() == [False, True, False, True, True]
    assert torch.equal(vectors.weight[vectors.found], KNOWN)
    assert vectors.weight.size() == (5, 3) and vectors.weight.dtype == torch.float
    assert vectors.weight.isfinite().all()


@pytest.mark.parametrize('name', ['vectors.txt', 'vectors.txt.gz', 'vectors.vec'])
def test_text(tmp_path, name):
    check(load_word_vectors(write(tmp_path / name, LINES), VOCAB))
    check(load_word_vectors(str(write(tmp_path / name, ['3 3', *LINES])), VOCAB))
    # As fastText writes them, and on another system.
    check(load_word_vectors(write(tmp_path / name, [x + ' \r' for x in LINES]), VOCAB))


def test_npz(tmp_path):
    check(load_word_vectors(write_npz(tmp_path / 'a.npz'), VOCAB))
    double = KNOWN.double().numpy()
    path = write_npz(tmp_path / 'b.npz', vectors=double, row=np.array([1, 0, 2]))
    check(load_word_vectors(path, VOCAB))


def test_words_with_blanks(tmp_path):
    lines = [
        *LINES,
        '. . . 5 6 7',
        'at name@domain.com 8 9 10',
        '\u00a0 1 1 1',
        ' 2 2 2',
    ]
    path = write(tmp_path / 'glove.txt', lines)
    check(load_word_vectors(path, VOCAB))
    weight, found = load_word_vectors(path, ['. . .', '.', 'at name@domain.com', 'at'])
    assert found.tolist() == [True, False, True, False]
    assert weight[[0, 2]].tolist() == [[5, 6, 7], [8, 9, 10]]


def test_words_that_are_there_twice(tmp_path):
    path = write(tmp_path / 'glove.txt', [*LINES, 'the 9 9 9', 'THE 8 8 8'])
    check(load_word_vectors(path, VOCAB))


def test_random_vectors(tmp_path):
    path = write(tmp_path / 'glove.txt', [*LINES, '<unk> 7 7 7'])
    state = torch.get_rng_state()
    weight, found = load_word_vectors(path, VOCAB)
    assert torch.equal(torch.get_rng_state(), state)
    assert not found[0] and weight[0].tolist() != [7, 7, 7]
    assert not torch.equal(weight[0], weight[2])
    other = load_word_vectors(path, VOCAB, seed=1).weight
    assert torch.equal(other[found], weight[found])
    assert not torch.equal(other[~found], weight[~found])
    # Not by the order of the file.
    path = write(tmp_path / 'glove.txt', LINES[::-1])
    assert torch.equal(load_word_vectors(path, VOCAB).weight, weight)

    # They are distributed as those that were found.
    vocab = [*VOCAB, *(f'word{i}' for i in range(4000))]
    weight, found = load_word_vectors(path, vocab)
    mean, std = weight[~found].mean(dim=0), weight[~found].std(dim=0)
    assert torch.allclose(mean, KNOWN.mean(dim=0), atol=0.1)
    assert torch.allclose(std, KNOWN.std(dim=0, correction=0), atol=0.1)


def test_normalize(tmp_path):
    path = write(tmp_path / 'glove.txt', LINES)
    weight, found = load_word_vectors(path, VOCAB, normalize=True)
    assert torch.allclose(weight.norm(dim=1), torch.ones(5))
    known = KNOWN / KNOWN.norm(dim=1, keepdim=True)
    assert torch.allclose(weight[found], known)


@pytest.mark.parametrize(
    ('lines', 'error'),
    [
        (['the 1 2 3', 'cat 1 2'], r"line 2 of '.*glove.txt' .*3 numbers \(got 2 "),
        (['the 1 2 3', 'other 1 2'], r'line 2 of .*3 numbers \(got 2 '),
        (['the 1 2 3', 'other 1 2 3 4'], r'line 2 of .*3 numbers \(got 4\)'),
        (['the 1 2 3', '', 'cat 1 2 3'], r'line 2 of .*\(got 0 after the word\)'),
        (['the 1 2 3', 'cat 1 x 3'], r"line 2 of .* to hold numbers \(got 'x'\)"),
        (['the 1 2 3', 'cat 1  3'], r"line 2 of .* to hold numbers \(got ''\)"),
        (['the 1 2 3', 'cat 1 nan 3'], r'line 2 of .* finite numbers'),
        (['About these vectors'], r"line 1 of .* to hold numbers \(got 'these'\)"),
        (['the\t1\t2'], r'line 1 of .* to be a word and its numbers \(got 0 '),
        (['2 3', *LINES], r'to hold 2 words, as its first line says \(got 3\)'),
        (['3 4', *LINES], r'line 2 of .*4 numbers \(got 3 '),
        (['bee 1 2 3'], "None of the 4 words has a vector in '.*glove.txt'"),
    ],
)
def test_wrong_lines(tmp_path, lines, error):
    path = write(tmp_path / 'glove.txt', lines)
    with pytest.raises(ValueError, match=error):
        load_word_vectors(path, VOCAB)


def test_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_word_vectors(tmp_path / 'nothing.txt', VOCAB)
    (tmp_path / 'empty.txt').touch()
    with pytest.raises(ValueError, match=r'empty.txt.* \(it is empty\)'):
        load_word_vectors(tmp_path / 'empty.txt', VOCAB)

    path = write(tmp_path / 'glove.txt.gz', LINES)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(EOFError, match=f"'{path}' is cut short after line "):
        load_word_vectors(path, VOCAB)
    path.write_bytes(b'no archive')
    with pytest.raises(ValueError, match=f"Cannot read '{path}' after line 0"):
        load_word_vectors(path, VOCAB)
    path.write_bytes(content[:-8] + bytes(8))  # A wrong checksum.
    with pytest.raises(ValueError, match=f"Cannot read '{path}' after line "):
        load_word_vectors(path, VOCAB)


@pytest.mark.parametrize(
    ('arrays', 'error'),
    [
        ({'words': None}, r"'.*npz' \(without the array words\)"),
        ({'words': None, 'vectors': None, 'x': [1]}, 'the array words and vectors'),
        ({'words': np.array([1, 2, 3])}, r"'words' .*strings \(got int64 of shape \[3"),
        ({'words': np.array(['a', 2, 3], dtype=object)}, r"Cannot read '.*npz' \(Obj"),
        ({'words': np.array(['a'] * 4)}, r'from 0 to 2, .*\(got 0 to 3\)'),
        ({'vectors': np.ones(3)}, r"'vectors' .*matrix .*of shape \[3\]"),
        ({'vectors': np.full((3, 2), np.inf)}, "'the' in '.*npz' to hold finite"),
        ({'row': np.array([0, 1])}, r"'row' in .*3 integers, .*of shape \[2\]"),
        ({'row': np.array([0, 1, -1])}, r'from 0 to 2, .*\(got -1 to 1\)'),
    ],
)
def test_wrong_npz(tmp_path, arrays, error):
    path = write_npz(tmp_path / 'vectors.npz', **arrays)
    with pytest.raises(ValueError, match=error):
        load_word_vectors(path, VOCAB)


def test_damaged_npz(tmp_path):
    path = write_npz(tmp_path / 'vectors.npz')
    content = path.read_bytes()
    for damaged in [b'', content[:-30], b'\x93NUMPY' + bytes(9)]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"Cannot read '{path}'"):
            load_word_vectors(path, VOCAB)
    with pytest.raises(FileNotFoundError):
        load_word_vectors(tmp_path / 'nothing.npz', VOCAB)


def test_wrong_arguments(tmp_path):
    path = write(tmp_path / 'glove.txt', LINES)
    with pytest.raises(
        ValueError, match=r'different words \(got 2 different ones of 3'
    ):
        load_word_vectors(path, ['the', 'cat', 'the'])
    with pytest.raises(TypeError, match=r"'seed' to be an integer \(got None\)"):
        load_word_vectors(path, VOCAB, seed=None)


@pytest.mark.parametrize(
    ('name', 'size', 'start'),
    [
        ('glove/glove.100d.20news-mrd.txt.gz', 100, [-0.038194, -0.24487, 0.72812]),
        ('glove/glove.840B.300d.partial.txt.gz', 300, [0.27204, -0.06203, -0.1884]),
        ('wordvec/explosion.300d.filtered.npz', 300, None),
    ],
)
def test_real_data(data_source, name, size, start):
    path = data_source / name
    if not path.exists():
        pytest.skip(f"needs the real data, but '{path}' is not there")
    if start is None:
        data = np.load(path)
        start = data['vectors'][data['row']][data['words'] == 'the'][0, :3].tolist()
    weight, found = load_word_vectors(path, ['<unk>', 'of', 'the', 'nosuchword'])
    assert weight.size() == (4, size)
    assert found.tolist() == [False, True, True, False]
    assert weight[2, :3].tolist() == pytest.approx(start)


@pytest.mark.parametrize('header', [b'', b'2 2\n'])
def test_byte_order_mark(tmp_path, header):
    file = tmp_path / 'vectors.txt'
    file.write_bytes(b'\xef\xbb\xbf' + header + b'a 1 2\nb 3 4\n')
    found = load_word_vectors(file, ['<unk>', 'a', 'b'])
    assert found.found.tolist() == [False, True, True]
    assert found.weight[1].tolist() == [1.0, 2.0]
