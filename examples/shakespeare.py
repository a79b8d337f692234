"""The model of examples/shakespeare.yaml: two layers of LSTM over characters (McMahan et al. 2017, 1602.05629)."""

from torch import Tensor, nn

__all__ = ["CharLSTM", "char_lstm"]


class CharLSTM(nn.Module):
    """Long short-term memory over characters."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, embedding)
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.read = nn.Linear(hidden, classes)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores of the next character, [batch, classes, characters]."""
        states, _ = self.recurrent(self.embed(characters))
        scores: Tensor = self.read(states).transpose(1, 2)
        return scores


def char_lstm(classes: int, embedding: int = 8, hidden: int = 256, layers: int = 2) -> CharLSTM:
    """Model of the paper, whose widths are the defaults.

    Args:
        classes: the number of characters.
        embedding: width of a character's vector.
        hidden: width of the state.
        layers: number of recurrent layers, one above the other.
    """
    return CharLSTM(classes, embedding, hidden, layers)
