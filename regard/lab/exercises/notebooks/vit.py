"""The exercise on the Vision Transformer, solved."""

# %% [markdown]
# # A Vision Transformer
#
# You will write a Vision Transformer (Dosovitskiy et al. 2021) in four parts, and let it learn
# handwritten digits. After each part, run its check: it says ✓, or what is wrong and where.
#
# | letter | size |
# |---|---|
# | B | images in a batch |
# | C, Y, X | channels, rows and columns of an image |
# | P, N | pixels along a patch's side; patches of an image |
# | D | width of the vectors between the layers |

# %%
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import MultiHeadAttention
from regard.data.image import digits
from regard.lab.exercises import vit as check

STEPS = 300

# %% [markdown]
# ## 1. Patches
#
# An image becomes a sequence: patches row by row, as one reads. Within a patch, the numbers are in
# the order channel, row, column.
#
# <details><summary>Hint</summary>Cut both axes in two by <code>view</code>, (B, C, Y/P, P, X/P, P),
# order the axes by <code>permute</code>, and flatten.</details>


# %%
def patches(images: Tensor, patch: int) -> Tensor:
    """(B, C, Y, X) to (B, N, C·P·P)."""
    # blank: cut both axes in two, bring the patch's own axes to the end, flatten.
    B, C, Y, X = images.shape
    cut = images.view(B, C, Y // patch, patch, X // patch, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * patch * patch)
    # end


# %%
check.patches(patches)

# %% [markdown]
# ## 2. Tokens
#
# $$x = [\text{class token};\; W p_1 + b;\; \dots;\; W p_N + b] + \text{positions}$$
#
# The class token is a trained vector in front of all patches; at the end it stands for the image.
# Every token has a trained position, the class token too.
#
# <details><summary>Hint</summary><code>self.class_token.expand(B, 1, -1)</code> is the same vector
# for every image; <code>torch.cat((…, …), 1)</code> puts it in front.</details>


# %%
class Tokens(nn.Module):
    def __init__(self, patches: int, numbers: int, width: int):
        super().__init__()
        self.projection = nn.Linear(numbers, width)
        self.class_token = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(0.02 * torch.randn(1 + patches, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C·P·P) to (B, 1 + N, D)."""
        # blank: project, put the class token in front, add the positions.
        x = self.projection(x)
        front = self.class_token.expand(len(x), 1, -1)
        return torch.cat((front, x), 1) + self.position
        # end


# %%
check.tokens(Tokens)

# %% [markdown]
# ## 3. A block
#
# $$x \leftarrow x + \text{attention}(\text{norm}_1(x)), \qquad
# x \leftarrow x + W_2\, \text{GELU}(W_1\, \text{norm}_2(x))$$
#
# <details><summary>Hint</summary>Two lines, and each begins with <code>x = x + </code>.</details>


# %%
class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = MultiHeadAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, hidden)
        self.reduce = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        # blank: attention and then the feed-forward network, each inside a skip.
        x = x + self.attention(self.norm1(x))
        return x + self.reduce(F.gelu(self.expand(self.norm2(x))))
        # end


# %%
check.block(Block)

# %% [markdown]
# ## 4. All of it
#
# Patches, tokens, blocks, a last LayerNorm; the head reads the class token.


# %%
class ViT(nn.Module):
    def __init__(
        self,
        image: tuple[int, int],
        patch: int,
        channels: int,
        classes: int,
        width: int,
        heads: int,
        hidden: int,
        layers: int,
    ):
        super().__init__()
        self.patch = patch
        count = (image[0] // patch) * (image[1] // patch)
        self.tokens = Tokens(count, channels * patch * patch, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, Y, X) to logits, (B, N)."""
        # blank: patches, tokens, every block, the norm; then the head on the class token.
        x = self.tokens(patches(images, self.patch))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
        # end


# %%
check.vit(ViT)

# %% [markdown]
# ## 5. Does it learn?
#
# 1,797 digits of 8 × 8 pixels; every fifth is held out. After half a minute or so, more than
# nine in ten should be right.

# %%
known = digits()
pixels = known.batch(np.arange(len(known))).float() / 127.5 - 1
labels = torch.from_numpy(known.labels)
held = torch.arange(len(labels)) % 5 == 0

torch.manual_seed(0)
model = ViT((8, 8), patch=2, channels=1, classes=10, width=48, heads=4, hidden=96, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, STEPS + 1):
    some = torch.randint(int((~held).sum()), (64,))
    loss = F.cross_entropy(model(pixels[~held][some]), labels[~held][some])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == STEPS:
        with torch.no_grad():
            right = (model(pixels[held]).argmax(-1) == labels[held]).float().mean()
        print(f"step {step}: loss {loss.item():.3f}, {right.item():.1%} right of those held out")
