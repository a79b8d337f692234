"""Distances between messages, by one matrix product about a message in their midst.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fed.vectors.computing_device import computing_device, parts_on
from fed.vectors.tensors import Tensor, nn, torch

__all__ = ["Gram", "differences_from", "squared_distances"]

_COLUMNS = 2**12
"""Number of columns in one matrix product: as fast as with all of them, and a copy of some dozen rows stays in
cache."""
_COLUMNS_OF_PAIRS = 2**11
"""Number of columns for which all pairs are subtracted at a time: those of all messages stay in the cache."""
_SAMPLED_COLUMNS = 2**13
_LOST = 1e-6
"""Smallest squared distance that a difference of squares may give, as a share of them: ten of 16 digits are left."""


class Gram(NamedTuple):
    """Products of messages' differences from one of them, which are those of all points between the messages.

    .. math:: G_{ij} = (m_i - c) · (m_j - c)

    Args:
        products_SS: G, the products of all pairs.
        centre: row of c, the message that differences are taken from.
    """

    products_SS: Tensor
    centre: int

    @classmethod
    def of(cls, messages_SM: Tensor) -> "Gram":
        """Products about the message that has the nearest half of the others, by a sample of the columns."""
        # A sample is enough: the centre changes only how many digits survive, and not what is computed.
        step = -(-messages_SM.shape[1] // _SAMPLED_COLUMNS)
        sample_SS = _from_differences(messages_SM[:, :: max(step, 1)])
        # By the median, so that fewer than half of the messages, the attackers', cannot choose a far one.
        centre = int(sample_SS.nan_to_num(torch.inf).median(1).values.argmin())
        # Products are of differences from the centre: those of alike messages themselves would cancel in float64.
        device = computing_device()
        if device is not None:
            return cls(_products_on(device, messages_SM, centre), centre)
        products_SS = messages_SM.new_zeros(len(messages_SM), len(messages_SM))
        for away_SJ in differences_from(messages_SM, messages_SM[centre]):
            products_SS.addmm_(away_SJ, away_SJ.T)
        return cls(products_SS, centre)


def _products_on(device: "torch.device", messages_SM: Tensor, centre: int) -> Tensor:
    """The products, found on a device, on the CPU."""
    products_SS = torch.zeros(len(messages_SM), len(messages_SM), dtype=messages_SM.dtype, device=device)
    for part_SJ in parts_on(device, messages_SM):
        away_SJ = part_SJ - part_SJ[centre]
        products_SS.addmm_(away_SJ, away_SJ.T)
    return products_SS.cpu()


def squared_distances(messages_SM: Tensor) -> Tensor:
    r"""Squares of the Euclidean distances, [S, S], by a matrix product about one message.

    .. math:: ‖m_i - m_j‖^2 = G_{ii} + G_{jj} - 2 G_{ij}

    Where messages are much nearer to each other than to that one, the difference would lose their digits: these squares
    are summed up from differences.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)).tolist()
        [[0.0, 25.0], [25.0, 0.0]]
    """
    products_SS, _ = Gram.of(messages_SM)
    squares_S = products_SS.diagonal()
    sums_SS = squares_S + squares_S.unsqueeze(1)
    found_SS = (sums_SS - 2 * products_SS).triu(1)  # a matrix product need not be symmetric to the bit
    found_SS = found_SS + found_SS.T
    is_lost_SS = ~(found_SS >= _LOST * sums_SS)  # true for NaN, the difference of infinite ones
    is_lost_SS.fill_diagonal_(False)
    lost = is_lost_SS.any(1).nonzero().squeeze(1)
    if len(lost):
        pairs = torch.meshgrid(lost, lost, indexing="ij")
        # Only among the rows concerned: differences of all pairs take many times as long as one product.
        found_SS[pairs] = torch.where(is_lost_SS[pairs], _from_differences(messages_SM, lost), found_SS[pairs])
    return found_SS


def differences_from(messages_SM: Tensor, point_M: Tensor) -> Iterator[Tensor]:
    """Differences from a point, some columns at a time, each in the place of those before."""
    held = messages_SM.new_empty(len(messages_SM) * min(_COLUMNS, messages_SM.shape[1]))
    for part_SJ, point_J in zip(torch.split(messages_SM, _COLUMNS, 1), torch.split(point_M, _COLUMNS), strict=True):
        yield torch.sub(part_SJ, point_J, out=held[: part_SJ.numel()].view_as(part_SJ))


def _from_differences(messages_SM: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
    """Squared distances between some rows."""
    parts = torch.split(messages_SM, _COLUMNS_OF_PAIRS, dim=1)
    # Unlike broadcasting, pdist makes no tensor [S, S, C], which would not fit into the cache.
    squares_U = torch.stack([nn.functional.pdist(part_SJ[rows].contiguous()).square() for part_SJ in parts]).sum(0)
    count = len(messages_SM[rows, :0])
    squares_SS = messages_SM.new_zeros(count, count)
    squares_SS[torch.triu_indices(count, count, offset=1).unbind()] = squares_U
    return squares_SS + squares_SS.T
