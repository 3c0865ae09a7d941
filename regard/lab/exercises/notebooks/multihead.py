"""The exercise on multi-head attention, solved."""

# %% [markdown]
# # Multi-head attention
#
# You will write multi-head attention in four small functions. After each, run its check: it says
# ✓, or what is wrong and where. Everything else is given.
#
# | letter | size |
# |---|---|
# | B | sentences in a batch |
# | H | heads |
# | L, S | queries, and keys with their values |
# | D | width of the vectors between the layers |
# | d_k, d_v | width of a head's keys and of its values, here D / H |

# %%
import torch
from torch import Tensor, nn

from regard.lab.exercises import multihead as check

# %% [markdown]
# ## 1. Attention
#
# $$A = \operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right), \qquad C = A V$$
#
# The last two axes of `query` are (L, d_k), of `key` (S, d_k), of `value` (S, d_v); all other axes
# just come along. `mask` is None, or a boolean tensor that broadcasts to (…, L, S) and is True
# where a query *may* attend to a key. A query that may attend to nothing receives zeros.
#
# <details><summary>Hint: the product</summary><code>query @ key.mT</code> multiplies the last two
# axes, and only those.</details>
# <details><summary>Hint: the mask</summary><code>scores.masked_fill(~mask, -torch.inf)</code>:
# exp(−∞) is 0. Before the softmax, so that the other weights still add up to 1.</details>
# <details><summary>Hint: nothing to attend to</summary>A row of −∞ gives 0/0, which is NaN.
# <code>nan_to_num(0.0)</code> turns it into 0.</details>


# %%
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """(…, L, d_k), (…, S, d_k), (…, S, d_v) to (…, L, d_v)."""
    # blank: scores, scale, mask, softmax along the keys, and the mean of the values.
    scores = query @ key.mT / key.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value
    # end


# %%
check.attention(attention)

# %% [markdown]
# ## 2. Heads
#
# A linear layer has given every position D numbers: those of head 1, then those of head 2, and so
# on. Each head shall attend by itself, so heads become an axis of their own, in front of the
# positions.
#
# <details><summary>Hint</summary><code>view</code> may cut one axis in two or join two neighbours;
# it never moves anything. <code>transpose</code> does.</details>


# %%
def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H·d_k) to (B, H, L, d_k)."""
    # blank: cut the last axis in two, then bring the heads forward.
    B, L, D = x.shape
    return x.view(B, L, heads, D // heads).transpose(1, 2)
    # end


def join_heads(x: Tensor) -> Tensor:
    """(B, H, L, d_k) to (B, L, H·d_k)."""
    # blank: the way back.
    return x.transpose(1, 2).flatten(2)
    # end


# %%
check.split_heads(split_heads)
check.join_heads(join_heads)

# %% [markdown]
# ## 3. Multi-head attention
#
# $$\text{head}_h = \text{attention}(x W_Q^h,\; s W_K^h,\; s W_V^h), \qquad
# y = [\text{head}_1; \dots; \text{head}_H]\, W_O$$
#
# Without a source $s$ it is self-attention, $s = x$; with one it is cross-attention. Nothing else
# differs.
#
# <details><summary>Hint</summary>Project, split, attend, join, project. Five lines.</details>


# %%
class MultiHead(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: Tensor, source: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, L, D), and (B, S, D) where there is a source, to (B, L, D)."""
        # blank: queries from x, keys and values from the source; the heads; W_O.
        source = x if source is None else source
        query = split_heads(self.query(x), self.heads)
        key = split_heads(self.key(source), self.heads)
        value = split_heads(self.value(source), self.heads)
        return self.output(join_heads(attention(query, key, value, mask)))
        # end


# %%
check.multihead(MultiHead)

# %% [markdown]
# ## 4. What it can and cannot do
#
# Attention has no idea of order: shuffle the input, and the output is shuffled the same way. A
# causal mask changes that.

# %%
layer = MultiHead(width=12, heads=3).double()
x = torch.randn(1, 5, 12, dtype=torch.float64)
order = torch.tensor([3, 0, 4, 1, 2])
causal = torch.ones(5, 5, dtype=torch.bool).tril()

with torch.no_grad():
    plain = (layer(x[:, order]) - layer(x)[:, order]).abs().max()
    masked = (layer(x[:, order], mask=causal) - layer(x, mask=causal)[:, order]).abs().max()
print(
    f"shuffled before or after: {float(plain):.1e} apart; under a causal mask {float(masked):.2f}"
)
