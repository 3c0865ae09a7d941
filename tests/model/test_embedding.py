"""Tokens, patches and frames become vectors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import Concatenated, GridPositions, LearnedGridPositions, SinusoidalPositions
from regard.model.embedding import Frames, Patches, Tokens, flat_patches, grid
from tests.model.samples import close

B, S, D = 3, 5, 14


def sines(positions: Tensor) -> Tensor:
    return SinusoidalPositions(D).encoding(positions, torch.float64)


def test_tokens_are_rows_times_the_root_of_the_width_plus_positions() -> None:
    tokens = Tokens(17, D, position=SinusoidalPositions(D)).double()
    ids = torch.randint(17, (B, S))
    rows = tokens.table.weight[ids]
    close(tokens(ids), math.sqrt(D) * rows + sines(torch.arange(S)))
    close(tokens(ids, 4)[:, 0], math.sqrt(D) * rows[:, 0] + sines(torch.tensor(4)))
    plain = Tokens(17, D, scale=False).double()
    assert torch.equal(plain(ids), plain.table.weight[ids])


def test_positions_say_where_each_row_stands() -> None:
    tokens, ids = Tokens(17, D, position=SinusoidalPositions(D)).double(), torch.randint(17, (B, S))
    at = torch.tensor([[0, 1, 0, 1, 2]]).expand(B, -1)
    close(tokens(ids, at)[:, 2:], tokens(ids[:, 2:]))


@pytest.mark.parametrize("kind", ["tokens", "patches", "frames"])
def test_concatenated_positions_take_their_room_from_the_width(kind: str) -> None:
    position = Concatenated(SinusoidalPositions(4))
    if kind == "tokens":
        layer, given = Tokens(17, D, position=position), torch.randint(17, (B, S))
    elif kind == "patches":
        layer, given = Patches((4, 6), 2, 3, D, position=position), torch.randn(B, 3, 4, 6)
    else:
        layer, given = Frames(7, D, position=position), torch.randn(B, S, 7)
    out = layer(given)
    assert out.shape[-1] == D
    want = SinusoidalPositions(4).encoding(torch.arange(out.shape[1])).expand(B, -1, -1)
    assert torch.equal(out[..., D - 4 :], want)


def test_patches_are_read_row_by_row() -> None:
    images = torch.arange(B * 3 * 4 * 6).view(B, 3, 4, 6).float()
    flat = flat_patches(images, 2)
    assert flat.shape == (B, 6, 12)
    for n in range(6):
        y, x = 2 * (n // 3), 2 * (n % 3)
        assert torch.equal(flat[:, n], images[:, :, y : y + 2, x : x + 2].flatten(1))


def test_the_map_of_patches_is_a_convolution() -> None:
    """Kernel = stride = patch; the matrix, read as (D, C, P, P), is the kernel."""
    layer = Patches((6, 10), 2, 3, D).double()
    images = torch.randn(B, 3, 6, 10, dtype=torch.float64)
    kernel = layer.projection.weight.view(D, 3, 2, 2)
    want = F.conv2d(images, kernel, layer.projection.bias, stride=2).flatten(2).mT
    close(layer(images), want, 4e-15)


@pytest.mark.parametrize(
    "position", [LearnedGridPositions(3, 5, D), GridPositions(3, 5, *[SinusoidalPositions(7)] * 2)]
)
def test_patches_have_rows_and_columns(position: nn.Module) -> None:
    layer = Patches((6, 10), 2, 3, D, position=position)
    blank = layer(torch.zeros(B, 3, 6, 10)) - layer.projection.bias
    close(blank, position.encoding(torch.arange(15)).expand(B, -1, -1), 1e-6)


def test_frames_are_mapped_one_by_one() -> None:
    layer, sound = (
        Frames(7, D, position=SinusoidalPositions(D)).double(),
        torch.randn(B, S, 7).double(),
    )
    close(layer(sound), layer.projection(sound) + sines(torch.arange(S)))


def test_dropout_falls_on_the_sum() -> None:
    layer = Tokens(17, D, position=SinusoidalPositions(D), dropout=0.5)
    ids = torch.randint(17, (B, S))
    kept = layer(ids)
    whole = layer.eval()(ids)
    assert ((kept == 0) | torch.isclose(kept, 2 * whole)).all()
    assert 0.3 < (kept == 0).float().mean() < 0.7


@pytest.mark.parametrize(
    ("image", "patch", "want"), [(224, 16, (14, 14)), (224, 14, (16, 16)), ((6, 10), 2, (3, 5))]
)
def test_grid(image: int | tuple[int, int], patch: int, want: tuple[int, int]) -> None:
    assert grid(image, patch) == want
