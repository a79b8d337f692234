"""Source ``digits``: scikit-learn's handwritten digits, which need no download.

Shapes: see :mod:`fed.layout`.
"""

import torch

from fed.clients.data.samples import Samples

__all__ = ["digits"]


def digits() -> Samples:
    """1,797 digits of 8×8 pixels in 10 classes (Alpaydin & Kaynak 1998, UCI), as vectors of 64 values in [0, 1].

    Example:
        >>> samples = digits()
        >>> tuple(samples.inputs.shape), samples.classes
        ((1797, 64), 10)
    """
    from sklearn.datasets import load_digits

    pixels_EF, labels_E = load_digits(return_X_y=True)
    # A pixel counts the dots of a 4×4 block of the scan: 0 to 16.
    inputs = torch.from_numpy(pixels_EF / 16).to(torch.float32)
    return Samples(inputs, torch.from_numpy(labels_E).to(torch.int64), classes=10)
