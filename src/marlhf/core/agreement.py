"""How well an estimator's gradient points where the true gradient points, measured without it.

Products of gradients from different batches are free of their noise, so the true gradient is known
through the batches of any unbiased estimator. The expected cosine of one batch's gradient with it

    cos(e) = mean_{i != j} g_e(i) . g_1(j) / sqrt(mean_i |g_e(i)|^2  mean_{i != j} g_1(i) . g_1(j))

counts bias and variance together: (cos_a / cos_b)^2 is about the ratio of samples that two
estimators need. Axes: E estimators, M batches, D parameters or projections of them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Agreement(NamedTuple):
    """What `gradient_agreement` finds; NaN where batches are too few, or too noisy, to tell.

    >>> import torch
    >>> gradients = torch.tensor([1.0, 2.0]).expand(1, 3, 2)  # no noise, no bias
    >>> gradient_agreement(gradients, gradients[0]).error
    tensor([0.])
    """

    cosine: Tensor  # [E], of a batch's gradient with the true one
    error: Tensor  # [E], the cosine's jackknife standard error
    consistency: Tensor  # [E], cosine with the estimator's own mean: low is noise, not bias
    replicates: Tensor  # [E, M], the cosine without each batch, for errors of differences


def gradient_agreement(
    gradients: Tensor,  # [E, M, D], of each estimator on each batch
    reference: Tensor,  # [M, D], of an unbiased estimator on the same batches
) -> Agreement:
    """Compare estimators of the policy gradient on the same independent batches.

    >>> import torch
    >>> exact = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(3, 4)
    >>> noisy = exact + torch.eye(4)[1:] / 2  # 1 / sqrt(1 + 1/4)
    >>> gradient_agreement(torch.stack((exact, noisy)), reference=noisy).cosine
    tensor([1.0000, 0.8944])
    """
    if gradients.ndim != 3 or reference.shape != gradients.shape[1:]:
        raise ValueError(
            "gradients must be [E, M, D] and reference [M, D]; "
            f"got {list(gradients.shape)} and {list(reference.shape)}."
        )
    if len(reference) < 3:
        raise ValueError(f"At least three batches are needed to compare; got {len(reference)}.")
    squares = gradients.square().sum(dim=2)  # [E, M]
    with_reference = gradients @ reference.T  # [E, M, M]
    with_itself = gradients @ gradients.transpose(1, 2)  # [E, M, M]
    truth = (reference @ reference.T)[None]  # [1, M, M]
    cross, cross_without = _cross_means(with_reference)
    true_square, true_square_without = _cross_means(truth)
    own, _ = _cross_means(with_itself)
    count = len(reference)
    square = squares.mean(dim=1)
    square_without = (squares.sum(dim=1, keepdim=True) - squares) / (count - 1)
    replicates = cross_without / (square_without * true_square_without).sqrt()
    return Agreement(
        cross / (square * true_square).sqrt(),
        jackknife_error(replicates),
        (own / square).sqrt(),
        replicates,
    )


def jackknife_error(replicates: Tensor) -> Tensor:
    """The standard error of a statistic, from its values without each batch: [..., M] -> [...].

    Of a difference between two estimators: `jackknife_error(replicates[0] - replicates[1])`.

    >>> import torch
    >>> jackknife_error(torch.tensor([2.0, 3.0, 4.0]))  # means of two of 5, 3 and 1
    tensor(1.1547)
    """
    count = replicates.shape[-1]
    spread = (replicates - replicates.mean(dim=-1, keepdim=True)).square().sum(dim=-1)
    return (spread * (count - 1) / count).sqrt()


def _cross_means(products: Tensor) -> tuple[Tensor, Tensor]:
    """Means of [E, M, M] over pairs of different batches: of all, [E], and without each, [E, M]."""
    count = products.shape[-1]
    diagonal = products.diagonal(dim1=1, dim2=2)  # [E, M]
    pairs = products.sum(dim=(1, 2)) - diagonal.sum(dim=1)
    of_batch = products.sum(dim=1) + products.sum(dim=2) - 2 * diagonal  # pairs that it is in
    without = (pairs[:, None] - of_batch) / ((count - 1) * (count - 2))
    return pairs / (count * (count - 1)), without
