"""The Vision Transformer: an image is a sequence of patches, and an encoder reads it.

    x = [class token; W patch_1; …; W patch_N] + positions
    y = LayerNorm(encoder(x))                  pre-norm blocks with GELU
    logits = head(y at the class token)        or at the mean of all patches

Dosovitskiy et al. 2021, "An Image Is Worth 16x16 Words". Only the encoder; the class token and the
positions are learned. The map of patches is a convolution (embedding.py).
"""

import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.checks import check_integer
from regard.attention.mask import Mask
from regard.attention.position import GridPositions, LearnedGridPositions
from regard.attention.state import LoadableModule, typed_as
from regard.model import build, init
from regard.model.block import Activation, Norm
from regard.model.build import BlockConfig, GridPosition, MakeAttention, MakeFeedForward
from regard.model.dropout import Dropout
from regard.model.embedding import Patches, Size, grid, image_size, nearby_patches
from regard.model.notebook import model_html
from regard.synonyms import suggest_names

Pool: TypeAlias = Literal["class", "mean"]


@dataclass(frozen=True, kw_only=True)
class VisionShape(BlockConfig):
    """Hyperparameters that do not depend on the images."""

    layers: int = 12
    """Number of layers (blocks)."""
    width: int = 768
    """Model width (d_model, hidden size): of the vectors between the layers."""
    heads: int = 12
    """Number of attention heads."""
    feed_forward: int = 3072
    """Hidden width of the feed-forward networks (d_ff)."""
    activation: Activation = "gelu"
    """Activation function of the feed-forward networks: relu, gelu, silu, or gated swiglu."""
    norm: Norm = "pre"
    """Pre-norm or post-norm: LayerNorm before each sublayer, or after each residual sum."""
    position: GridPosition = "learned"
    """Positional encoding of patches: learned, sinusoids of row and column, or none."""
    pool: Pool = "class"
    """Pooling: the class token, or the mean over the patches."""
    class_token: bool | None = None
    """A learned class token in front of the patches; by default where pool is class."""
    pool_norm: bool = False
    """The final LayerNorm after pooling instead of before it."""
    head_width: int | None = None
    """Width of a hidden tanh layer in the head, as at pre-training; by default none."""
    dropout: float = 0.0
    """Dropout on the embedded input and on every sublayer's output."""
    epsilon: float = 1e-6
    """Epsilon of the LayerNorms, added to the variance."""


@suggest_names
@dataclass(frozen=True)
class VisionConfig(VisionShape):
    """The whole config of a Vision Transformer; the defaults are ViT-B/16's.

    >>> from regard import VisionConfig, VisionTransformer
    >>> config = VisionConfig.tiny(classes=10, image=32, patch=4, layers=2, pool="mean")
    >>> VisionTransformer(config).head.output
    Linear(in_features=192, out_features=10, bias=True)
    """

    classes: int
    """Number of classes."""
    image: Size = 224
    """Image size in pixels: (rows, columns), or one number for a square."""
    patch: int = 16
    """Patch size in pixels."""
    _: KW_ONLY
    channels: int = 3
    """Channels: 3 for colour, 1 for grey."""

    @classmethod
    def tiny(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionConfig":
        """Returns the config of DeiT-Ti of Touvron et al. (2021)."""
        return replace(
            cls(classes, image, patch, width=192, heads=3, feed_forward=768), **overrides
        )

    @classmethod
    def small(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionConfig":
        """Returns the config of DeiT-S of Touvron et al. (2021)."""
        return replace(
            cls(classes, image, patch, width=384, heads=6, feed_forward=1536), **overrides
        )

    @classmethod
    def base(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionConfig":
        """Returns the config of ViT-B of Dosovitskiy et al. (2021), table 1."""
        return cls(classes, image, patch, **overrides)

    @classmethod
    def large(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionConfig":
        """Returns the config of ViT-L of Dosovitskiy et al. (2021), table 1."""
        return replace(
            cls(classes, image, patch, layers=24, width=1024, heads=16, feed_forward=4096),
            **overrides,
        )

    @classmethod
    def huge(
        cls, classes: int, image: Size = 224, patch: int = 14, **overrides: Any
    ) -> "VisionConfig":
        """Returns the config of ViT-H of Dosovitskiy et al. (2021), table 1."""
        return replace(
            cls(classes, image, patch, layers=32, width=1280, heads=16, feed_forward=5120),
            **overrides,
        )


@suggest_names
class VisionTransformer(LoadableModule):
    """A classifier of images, as sequences of patches; `VisionTransformer.base(1000)` is ViT-B/16.

        x = [class token; W patch_1; …; W patch_N] + positions
        logits = head(LayerNorm(encoder(x)) at the class token)

    Shapes: images (B, C, Y, X) → logits (B, N). "An Image Is Worth 16x16 Words", Dosovitskiy et al.
    (2021). Custom parts are passed as functions, as to `Transformer`.

    >>> import torch
    >>> from regard import VisionTransformer
    >>> model = VisionTransformer.tiny(classes=1000, image=32, patch=8)
    >>> images = torch.zeros(2, 3, 32, 32)
    >>> model(images).shape, model.represent(images).shape, model.features(images).shape
    (torch.Size([2, 1000]), torch.Size([2, 192]), torch.Size([2, 17, 192]))
    >>> tuned = model.replace_head(10).resize_images((32, 48)).freeze_backbone()  # of a copy
    >>> tuned(torch.zeros(2, 3, 32, 48)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        attention: MakeAttention | None = None,
        feed_forward: MakeFeedForward | None = None,
    ):
        super().__init__()
        makers = {"attention": attention, "feed_forward": feed_forward}
        self.custom = build.check(config, VisionConfig, **makers)
        self.config = config
        check_integer("classes", config.classes)
        rows, columns = grid(config.image, config.patch)
        self.patches = Patches(
            config.image,
            config.patch,
            config.channels,
            config.width,
            position=build.grid_position(config.position, config, rows, columns),
        )
        self.class_token: nn.Parameter | None = None
        self.class_position: nn.Parameter | None = None
        if _with_class_token(config):
            self.class_token = nn.Parameter(torch.empty(config.width))
            if config.position == "learned":
                self.class_position = nn.Parameter(torch.empty(config.width))
        self.dropout = Dropout(config.dropout)
        blocks = replace(config, final_norm=False) if config.pool_norm else config
        self.encoder = build.stack(
            blocks, config.layers, attention=attention, feed_forward=feed_forward
        )
        self.norm = nn.LayerNorm(config.width, config.epsilon) if config.pool_norm else None
        # Other layers than standard attention may need all rows as queries.
        self.whole = "attention" in self.custom or config.mixer != "attention"
        self.head = Head(config.width, config.classes, config.head_width)
        self.reset_parameters()

    @classmethod
    def tiny(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionTransformer":
        """Returns the model DeiT-Ti of Touvron et al. (2021)."""
        return cls(VisionConfig.tiny(classes, image, patch, **overrides))

    @classmethod
    def small(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionTransformer":
        """Returns the model DeiT-S of Touvron et al. (2021)."""
        return cls(VisionConfig.small(classes, image, patch, **overrides))

    @classmethod
    def base(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionTransformer":
        """Returns the model ViT-B of Dosovitskiy et al. (2021), table 1.

        >>> import torch
        >>> from regard import VisionTransformer
        >>> with torch.device("meta"):  # without memory for the weights
        ...     model = VisionTransformer.base(1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        86567656
        """
        return cls(VisionConfig.base(classes, image, patch, **overrides))

    @classmethod
    def large(
        cls, classes: int, image: Size = 224, patch: int = 16, **overrides: Any
    ) -> "VisionTransformer":
        """Returns the model ViT-L of Dosovitskiy et al. (2021), table 1."""
        return cls(VisionConfig.large(classes, image, patch, **overrides))

    @classmethod
    def huge(
        cls, classes: int, image: Size = 224, patch: int = 14, **overrides: Any
    ) -> "VisionTransformer":
        """Returns the model ViT-H of Dosovitskiy et al. (2021), table 1."""
        return cls(VisionConfig.huge(classes, image, patch, **overrides))

    def reset_parameters(self) -> None:
        """Draws all weights anew, in place."""
        init.vision(self, self.custom)
        init.classifier(self.head.output)
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.class_position is not None:
            nn.init.normal_(self.class_position, std=0.02)

    def _repr_html_(self) -> str:
        return model_html(self)

    def forward(self, images: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B N"]:
        """Returns the logits of each image: (B, C, Y, X) → (B, N)."""
        return self.head(self.represent(images))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> None: ...

    def represent(self, images: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B D"]:
        """Returns the pooled features of each image, which the head reads: (B, D)."""
        if self.config.pool == "mean":
            patches = self.features(images)[:, 0 if self.class_token is None else 1 :]
            pooled = patches.mean(1)
        else:
            # Only the class token of the last block is read, so the other rows are not computed.
            rows = None if self.whole else 1
            pooled = self.encoder(self.embed(images), mask=self._mask(), rows=rows)[:, 0]
        return pooled if self.norm is None else self.norm(pooled)

    def features(self, images: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B S D"]:
        """Returns the last hidden states of the class token, if any, and the patches, (B, S, D)."""
        return self.encoder(self.embed(images), mask=self._mask())

    def _mask(self) -> Mask | None:
        """The window of the patches; the class token attends to all of them."""
        reach = self.config.window
        if reach is None:
            return None
        return nearby_patches(*self.patches.grid, reach, first=self.class_token is not None)

    def embed(self, images: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B S D"]:
        """Returns the encoder's input: the class token, if any, and the patches, (B, S, D)."""
        x = self.patches(images)
        if self.class_token is not None:
            position = 0 if self.class_position is None else self.class_position
            # Repeated rather than expanded: contiguous parts are copied four times as fast.
            x = torch.cat(((self.class_token + position).repeat(len(x), 1, 1), x), 1)
        return self.dropout(x)

    def replace_head(self, classes: int) -> "VisionTransformer":
        """Returns a copy with a new, untrained head of one linear layer, for other labels."""
        check_integer("classes", classes)
        model = copy.deepcopy(self)
        model.config = replace(self.config, classes=classes, head_width=None)
        old = self.head.output.weight
        head = Head(self.config.width, classes, None)
        init.classifier(head.output)
        model.head = head.to(old.device, old.dtype)
        return model

    def resize_images(self, image: Size) -> "VisionTransformer":
        """Returns a copy for images of another size, with interpolated positions."""
        rows, columns = grid(image, self.config.patch)
        model = copy.deepcopy(self)
        model.config = replace(self.config, image=image)
        position = self.patches.position
        if isinstance(position, LearnedGridPositions | GridPositions):
            model.patches.position = position.resize(rows, columns)
        model.patches.image, model.patches.grid = image_size(image), (rows, columns)
        return model

    def freeze_backbone(self) -> "VisionTransformer":
        """Freezes all but the head, in place, and returns the model.

        The backbone keeps its weights, as after `requires_grad_(False)`; the head is trained.
        """
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for parameter in self.head.parameters():
            parameter.requires_grad_(True)
        return self


class Head(nn.Module):
    """One linear layer, after a hidden tanh layer at pre-training."""

    def __init__(self, width: int, classes: int, hidden: int | None):
        super().__init__()
        if hidden is not None:
            check_integer("head_width", hidden)
        self.hidden = None if hidden is None else nn.Linear(width, hidden)
        self.output = nn.Linear(hidden or width, classes)

    def forward(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        if self.hidden is not None:
            x = torch.tanh(self.hidden(x))
        return self.output(x)


def _with_class_token(config: VisionConfig) -> bool:
    pool, class_token = config.pool, config.class_token
    if pool not in get_args(Pool):
        raise ValueError(f"pool ({pool!r}) is unknown; choose from {', '.join(get_args(Pool))}")
    if pool == "class" and class_token is False:
        raise ValueError("pool ('class') reads the class token, but class_token is False; use mean")
    return pool == "class" if class_token is None else class_token
