"""Source ``digits``: handwritten digits that come with the package.

``digits.npz`` is the test set of "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak 1998, UCI Machine
Learning Repository, doi 10.24432/C50P49, CC BY 4.0), as scikit-learn has it.

Shapes: see :mod:`fed.vectors.layout`.
"""

from pathlib import Path

import numpy as np

from fed.clients.data.samples import Samples
from fed.vectors.tensors import torch

__all__ = ["digits"]


def digits() -> Samples:
    """1,797 digits of 8×8 pixels in 10 classes, as vectors of 64 values in [0, 1].

    Example:
        >>> samples = digits()
        >>> tuple(samples.inputs.shape), samples.classes
        ((1797, 64), 10)
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        pixels_EF = torch.from_numpy(file["pixels"])
        labels_E = torch.from_numpy(file["labels"])
    # A pixel counts the dots of a 4×4 block of the scan: 0 to 16.
    return Samples(pixels_EF.to(torch.float32) / 16, labels_E.to(torch.int64), classes=10)
