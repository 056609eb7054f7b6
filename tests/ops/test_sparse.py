import pytest
import torch
from torch.autograd import gradcheck

from torch_geometric_idgl.ops import Pattern, SparseMatrix, sddmm
from torch_geometric_idgl.ops import sparse as module

ROW = torch.tensor([2, 0, 0, 3, 2])
COL = torch.tensor([1, 2, 0, 3, 0])
SHAPE = (5, 4)  # rows 1 and 4 are empty


def values(seed=0, n=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, generator=generator, dtype=torch.float64) + 0.1


def dense_of(value):
    dense = torch.zeros(SHAPE, dtype=value.dtype)
    return dense.index_put((ROW, COL), value, accumulate=True)


def uniform(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def test_pattern():
    pattern, perm = Pattern.from_coo(ROW, COL, SHAPE)
    assert (pattern.num_rows, pattern.num_cols, pattern.nnz) == (5, 4, 5)
    assert pattern.rowptr.tolist() == [0, 2, 2, 4, 5, 5]
    assert pattern.row.tolist() == [0, 0, 2, 2, 3]
    assert pattern.col.tolist() == [0, 2, 0, 1, 3]
    assert ROW[perm].tolist() == pattern.row.tolist()
    assert COL[perm].tolist() == pattern.col.tolist()

    transposed, perm = pattern.transposed
    assert (transposed.num_rows, transposed.num_cols) == (4, 5)
    assert transposed.row.tolist() == pattern.col[perm].tolist()
    assert transposed.col.tolist() == pattern.row[perm].tolist()
    back, inverse = transposed.transposed
    assert back.rowptr.tolist() == pattern.rowptr.tolist()
    assert back.col.tolist() == pattern.col.tolist()
    assert perm[inverse].tolist() == list(range(5))
    assert pattern.places(0, 3) == slice(0, 4) and pattern.places(1, 2) == slice(2, 2)


@pytest.mark.parametrize('width', [3, 600])  # at once, and by blocks of columns
def test_products(width):
    value = values().requires_grad_()
    f, g = uniform(4, width).requires_grad_(), uniform(5, width).requires_grad_()
    for inputs, actual, expected in [
        (f, lambda m: m.matmul(f), lambda d: d @ f),
        (g, lambda m: m.t_matmul(g), lambda d: d.t() @ g),
    ]:
        actual = actual(SparseMatrix.from_coo(ROW, COL, value, SHAPE))
        expected = expected(dense_of(value))
        torch.testing.assert_close(actual, expected)
        cotangent = uniform(*expected.shape)
        grads = torch.autograd.grad((actual * cotangent).sum(), (value, inputs))
        wanted = torch.autograd.grad((expected * cotangent).sum(), (value, inputs))
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other)


def test_gradcheck():
    f = uniform(4, 2).requires_grad_()
    value = values().requires_grad_()

    def product(value, f):
        return SparseMatrix.from_coo(ROW, COL, value, SHAPE).matmul(f)

    assert gradcheck(product, (value, f))

    pattern, _ = Pattern.from_coo(ROW, COL, SHAPE)
    a = uniform(5, 2).requires_grad_()
    assert gradcheck(lambda a, f: sddmm(pattern, a, f), (a, f))


def test_sddmm():
    pattern, _ = Pattern.from_coo(ROW, COL, SHAPE)
    a, b = uniform(5, 3), uniform(4, 3)
    expected = (a @ b.t())[pattern.row, pattern.col]
    torch.testing.assert_close(sddmm(pattern, a, b), expected)


def test_constructors_agree():
    value = values()
    dense = dense_of(value)
    matrices = [
        SparseMatrix.from_coo(ROW, COL, value, SHAPE),
        SparseMatrix.from_dense(dense),
        SparseMatrix.from_torch(dense.to_sparse_csr()),
        SparseMatrix.from_torch(dense.to_sparse_csc()),
        SparseMatrix.from_torch(dense.to_sparse_coo()),
        SparseMatrix.from_torch(
            torch.sparse_coo_tensor([ROW.tolist(), COL.tolist()], value, SHAPE)
        ),
    ]
    for matrix in matrices:
        assert matrix.shape == SHAPE
        assert (matrix.size(0), matrix.size(1)) == SHAPE
        assert matrix.dtype == torch.float64
        assert matrix.device == value.device
        assert torch.equal(matrix.to_dense(), dense)
        double = matrix.with_value(2 * matrix.value)
        assert torch.equal(double.to_dense(), 2 * dense)


def test_entries_at_the_same_place_add_up():
    row, col = torch.tensor([1, 1, 0]), torch.tensor([2, 2, 0])
    matrix = SparseMatrix.from_coo(row, col, torch.tensor([1.0, 2.0, 5.0]), (2, 3))
    expected = torch.tensor([[5.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
    assert torch.equal(matrix.to_dense(), expected)
    f = torch.rand(3, 2)
    torch.testing.assert_close(matrix.matmul(f), expected @ f)
    torch.testing.assert_close(matrix.t_matmul(f[:2]), expected.t() @ f[:2])


def test_rows():
    dense = dense_of(values())
    matrix = SparseMatrix.from_dense(dense)
    for index in ([2, 0], [4, 3, 1], [0, 0, 2], []):
        index = torch.tensor(index, dtype=torch.long)
        assert torch.equal(matrix.rows(index).to_dense(), dense[index])


def test_empty():
    for shape in [(3, 4), (0, 4), (3, 0)]:
        dense = torch.zeros(shape, dtype=torch.float64)
        matrix = SparseMatrix.from_dense(dense)
        f = uniform(shape[1], 2).requires_grad_()
        out = matrix.matmul(f)
        assert out.shape == (shape[0], 2) and out.eq(0).all()
        out.sum().backward()
        assert f.grad.eq(0).all()
        assert matrix.t_matmul(uniform(shape[0], 2)).shape == (shape[1], 2)
    assert SparseMatrix.from_dense(dense_of(values())).matmul(uniform(4, 0)).shape == (
        5,
        0,
    )


def test_non_contiguous():
    dense = dense_of(values())
    matrix = SparseMatrix.from_dense(dense)
    f = uniform(3, 4).t()
    torch.testing.assert_close(matrix.matmul(f), dense @ f)
    g = uniform(5, 6)[:, ::2]
    torch.testing.assert_close(matrix.t_matmul(g), dense.t() @ g)


@pytest.mark.parametrize('bounds', [(0, 5), (1, 4), (2, 2), (4, 5)])
def test_row_range(bounds):
    dense = dense_of(values())
    matrix = SparseMatrix.from_dense(dense).row_range(*bounds)
    part = dense[slice(*bounds)]
    f, g, scale = uniform(4, 3), uniform(part.size(0), 3), uniform(part.size(0))
    assert torch.equal(matrix.to_dense(), part)
    torch.testing.assert_close(matrix.matmul(f), part @ f)
    torch.testing.assert_close(matrix.t_matmul(g), part.t() @ g)
    expected = part.t() @ (scale.unsqueeze(1) * g)
    torch.testing.assert_close(matrix.scaled_t_matmul(scale, g), expected)


@pytest.mark.parametrize('share', [0.0, 1.0])
@pytest.mark.parametrize('shape', [(5, 4), (4, 5)])
def test_sddmm_by_tiles_and_by_places(shape, share, monkeypatch):
    monkeypatch.setattr(module, '_DENSE_DOTS', share)
    # Blocks of one row of places, or of two rows of tiles:
    monkeypatch.setattr(module, 'block_entries', lambda device: 8 if share == 0 else 0)
    row, col = (ROW, COL) if shape == SHAPE else (COL, ROW)
    pattern, _ = Pattern.from_coo(row, col, shape)
    a, b = uniform(shape[0], 3).requires_grad_(), uniform(shape[1], 3).requires_grad_()
    expected = (a @ b.t())[pattern.row, pattern.col]
    actual = sddmm(pattern, a, b)
    torch.testing.assert_close(actual, expected)
    # Entries that are known get the same gradient.
    known = sddmm(pattern, a, b, expected.detach())
    assert torch.equal(known, expected)
    cotangent = uniform(pattern.nnz)
    wanted = torch.autograd.grad(expected, (a, b), cotangent)
    for dots in [actual, known]:
        for grad, other in zip(
            torch.autograd.grad(dots, (a, b), cotangent), wanted, strict=True
        ):
            torch.testing.assert_close(grad, other)


def test_transposed_products_have_gradients_of_their_own():
    sorted_matrix = SparseMatrix.from_coo(ROW, COL, values(), SHAPE)
    value = sorted_matrix.value.requires_grad_()
    matrix = SparseMatrix(sorted_matrix.pattern, value)
    dense = torch.rand(SHAPE[0], 2, dtype=value.dtype)
    with torch.no_grad():
        matrix.t_matmul(dense)
    grads = []
    for _ in range(2):  # the second must not go through what the first has freed
        matrix.matmul(torch.rand(SHAPE[1], 2, dtype=value.dtype)).sum().backward()
        value.grad = None
        matrix.t_matmul(dense).sum().backward()
        grads.append(value.grad.clone())
    expected = torch.autograd.grad((matrix.to_dense().t() @ dense).sum(), value)[0]
    for grad in grads:
        torch.testing.assert_close(grad, expected)


def test_places_that_come_twice_become_one():
    """As `scipy.sparse` may give them; torch does not look."""
    pointers, columns = torch.tensor([0, 3, 3, 5]), torch.tensor([2, 0, 2, 1, 0])
    csr = torch.sparse_csr_tensor(
        pointers, columns, torch.arange(1.0, 6.0), (3, 3), check_invariants=False
    )
    matrix = SparseMatrix.from_torch(csr)
    expected = torch.tensor([[2.0, 0, 4], [0, 0, 0], [5, 4, 0]])
    assert torch.equal(matrix.to_dense(), expected)
    square = matrix.with_value(matrix.value.square())
    assert torch.equal(square.to_dense(), expected.square())
    for dense in (expected, torch.zeros(2, 3), torch.zeros(0, 3), torch.eye(3)):
        canonical = SparseMatrix.from_torch(dense.to_sparse_csr())
        assert canonical.pattern.is_canonical
        assert torch.equal(canonical.to_dense(), dense)
