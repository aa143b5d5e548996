"""Singular value thresholding by a Gram matrix: the definition's numbers, and where it leaves the work to it."""

from __future__ import annotations

import pytest
import torch

from personafl.core import prox
from personafl.fast import singular
from personafl.fast.table import enabled


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (20, 20), (1, 9), (9, 1)])
@pytest.mark.parametrize("width", [0.05, 1.0, 4.0, 100.0])
def test_it_is_the_definition(shape: tuple[int, int], width: float) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = singular.by_gram(matrix, width)
    assert found is not None
    u, v = found
    wanted = prox.nuclear(matrix, width)
    assert u.shape == wanted[0].shape
    assert v.shape == wanted[1].shape
    torch.testing.assert_close(u @ v, wanted[0] @ wanted[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(v @ v.mT, torch.eye(len(v), dtype=torch.float64), atol=1e-11, rtol=0)


def test_of_a_float32_matrix_it_is_nearer_to_the_truth_than_a_float32_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    matrix = ((u * torch.logspace(1, -4, 40, dtype=torch.float64)) @ v).float()  # singular values from 10 to 10⁻⁴
    width = 2e-4
    truth = torch.mm(*prox.nuclear(matrix.double(), width))
    plain, found = prox.nuclear(matrix, width), singular.by_gram(matrix, width)
    assert found is not None
    errors = [(torch.mm(*factors).double() - truth).norm() for factors in (found, plain)]
    assert errors[0] < errors[1]


def test_a_width_that_is_too_small_for_it_is_left_to_the_definition() -> None:
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert singular.by_gram(matrix, 1e-7) is None
    assert singular.by_gram(torch.zeros(3, 3), 0.0) is None


def test_a_cpu_computes_the_definition() -> None:
    matrix = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    plain = prox.nuclear(matrix, 0.5)
    with enabled():
        found = prox.nuclear(matrix, 0.5)
    assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True))
