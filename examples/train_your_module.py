"""Train a module of your own: python examples/train_your_module.py [FOLDER]"""

import sys

import torch
from torch import Tensor, nn

from regard import MultiHeadAttention, Supervised, TrainingConfig, fit


class Counter(nn.Module):
    """How often the first token occurs in a sequence."""

    def __init__(self, tokens: int = 5, width: int = 16):
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.attention = MultiHeadAttention(width, heads=2)
        self.head = nn.Linear(width, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        x = x + self.attention(x)
        logits: Tensor = self.head(x[:, 0])
        return logits


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


folder = sys.argv[1] if len(sys.argv) > 1 else "runs/counter"
ids = torch.randint(5, (600, 8))
labels = (ids == ids[:, :1]).sum(1)
task = Supervised(
    Counter(),
    (ids[100:], labels[100:]),
    (ids[:100], labels[:100]),
    loss=nn.functional.cross_entropy,
    score=accuracy,
)
result = fit(task, TrainingConfig(epochs=3, lr=0.01, warmup=5, tensorboard=False), folder)
print(f"{task.score} {result.best}")
