"""Recurrent, convolutional and dense layers: torch's own numbers, and the masks' meaning."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    LanguageConfig,
    LanguageModel,
    Mask,
    PackedLengths,
    SelfCache,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    causal,
    packed,
    padding,
    window,
)
from regard.model.baseline import Baseline, Convolution, Dense, Recurrent

B, L, D = 3, 7, 10

MAKE: dict[str, Callable[[], Baseline]] = {
    "lstm": lambda: Recurrent(D),
    "gru": lambda: Recurrent(D, "gru"),
    "convolution": lambda: Convolution(D, 3),
    "causal convolution": lambda: Convolution(D, 5, causal=True, groups=2),
    "wide convolution": lambda: Convolution(D, 11, groups=D),
    "dense": lambda: Dense(D, 13),
}
BOTH: dict[str, Callable[[], Baseline]] = {
    "lstm, both": lambda: Recurrent(D, both=True),
    "gru, both": lambda: Recurrent(D, "gru", both=True),
}


def layers(makers: dict[str, Callable[[], Baseline]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", makers.values(), ids=makers)


def close(have: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(have, want, atol=1e-12, rtol=1e-12)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def reach(layer: nn.Module, mask: Mask | None, length: int = L) -> Tensor:
    """Which row of the input each row of the output depends on, by the Jacobian."""
    x = normal(1, length, D)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, mask=mask), x)
    return jacobian.abs().sum((0, 2, 3, 5)) > 0


# --- The same numbers as torch's layers


@pytest.mark.parametrize(("kind", "peer"), [("lstm", nn.LSTM), ("gru", nn.GRU)])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_is_torchs(kind: str, peer: type[nn.LSTM], both: bool) -> None:
    layer = Recurrent(D, kind, both).double()
    other = peer(D, D // 2 if both else D, batch_first=True, bidirectional=both).double()
    ways = {"": layer.forwards, "_reverse": layer.backwards}
    named = {
        name + end: value
        for end, way in ways.items()
        if way is not None
        for name, value in way.state_dict().items()
    }
    other.load_state_dict(named)
    x = normal(B, L, D)
    close(layer(x), other(x)[0])
    lengths = torch.tensor([L, 4, 1])
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    want, _ = nn.utils.rnn.pad_packed_sequence(other(rows)[0], batch_first=True)
    real = (torch.arange(L) < lengths[:, None])[..., None]
    close(layer(x, mask=padding(lengths)) * real, want)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("groups", [1, 5])
def test_convolution_is_torchs(kernel: int, groups: int) -> None:
    layer = Convolution(D, kernel, groups=groups).double()
    x = normal(B, L, D)
    taps = layer.convolution
    centred = F.pad(x.mT, ((kernel - 1) // 2, kernel // 2))
    shifted = F.pad(x.mT, (kernel - 1, 0))
    close(layer(x), F.conv1d(centred, taps.weight, taps.bias, groups=groups).mT)
    want = F.conv1d(shifted, taps.weight, taps.bias, groups=groups).mT
    close(layer(x, mask=causal()), want)
    layer.causal = True
    close(layer(x), want)


def test_dense_is_one_linear_layer_over_everything() -> None:
    layer, x = Dense(D, L).double(), normal(B, L, D)
    close(layer(x), layer.dense(x.flatten(1)).unflatten(1, (L, D)))
    short = x[:, :4]
    close(layer(short), layer(F.pad(short, (0, 0, 0, 3)))[:, :4])


# --- What masks mean


@layers(MAKE)
def test_causal_hides_what_comes_after(make: Callable[[], Baseline]) -> None:
    depends = reach(make().double(), causal())
    assert not depends.triu(1).any()
    assert depends.diagonal().all()


@layers(BOTH | {name: MAKE[name] for name in ("wide convolution", "dense")})
def test_without_a_mask_everything_is_seen(make: Callable[[], Baseline]) -> None:
    assert reach(make().double(), None, 5).all()


@pytest.mark.parametrize(
    ("make", "order"),
    [pytest.param(make, None, id=name) for name, make in (MAKE | BOTH).items()]
    + [pytest.param(make, causal(), id=f"{name}, under causal()") for name, make in MAKE.items()],
)
def test_padded_packed_and_alone_are_the_same(
    make: Callable[[], Baseline], order: Mask | None
) -> None:
    layer = make().double()
    lengths = [5, 0, 7]
    x = normal(B, L, D)
    # Filling may hold anything, and neither values nor gradients notice.
    for b, length in enumerate(lengths):
        x[b, length:] = torch.nan
    x.requires_grad_()
    rows = [x[b, :length] for b, length in enumerate(lengths)]

    def joined(other: Mask) -> Mask:
        return other if order is None else order & other

    alone = torch.cat([layer(row[None], mask=order)[0] for row in rows])
    out = layer(x, mask=joined(padding(torch.tensor(lengths))))
    from_padded = torch.cat([out[b, :length] for b, length in enumerate(lengths)])
    from_packed = layer(torch.cat(rows)[None], mask=joined(packed(PackedLengths(lengths))))[0]
    for have in (from_padded, from_packed):
        close(have, alone)
    wanted = (x, *layer.parameters())
    seeds = torch.randn_like(alone)
    have, other, want = (
        torch.autograd.grad(y, wanted, seeds, retain_graph=True)
        for y in (from_padded, from_packed, alone)
    )
    for one, two, three in zip(have, other, want):
        close(one, three)
        close(two, three)


@layers(MAKE | BOTH)
def test_nothing_at_all(make: Callable[[], Baseline]) -> None:
    layer = make()
    for shape in ((0, L, D), (B, 0, D)):
        assert layer(torch.zeros(shape)).shape == shape
    assert layer(torch.zeros(1, 0, D), mask=packed([0, 0])).shape == (1, 0, D)


# --- Step by step


@layers(MAKE)
@pytest.mark.parametrize("capacity", [None, 11])
@pytest.mark.parametrize("gradients", [False, True])
def test_steps_equal_the_whole(
    make: Callable[[], Baseline], capacity: int | None, gradients: bool
) -> None:
    layer, x = make().double(), normal(B, L, D)
    with torch.set_grad_enabled(gradients):
        cache = SelfCache(capacity)
        steps = x.split([1, 2, 1, 3], 1)
        have = torch.cat([layer(step, mask=causal(), cache=cache) for step in steps], 1)
        want = layer(x, mask=causal())
    close(have, want)
    assert int(cache.length) == L
    if gradients:
        seeds = torch.randn_like(want)
        own = list(layer.parameters())
        pairs = zip(*(torch.autograd.grad(y, own, seeds) for y in (have, want)))
        for one, two in pairs:
            close(one, two)


@layers(MAKE)
@torch.no_grad()
def test_select_reorders_what_was(make: Callable[[], Baseline]) -> None:
    layer, x, cache = make().double(), normal(B, L, D), SelfCache()
    layer(x[:, :4], mask=causal(), cache=cache)
    rows = [2, 0, 2, 1]
    cache.select(rows)
    have = layer(x[rows, 4:], mask=causal(), cache=cache)
    close(have, layer(x, mask=causal())[rows, 4:])


# --- In the place of attention


@pytest.mark.parametrize("name", MAKE)
def test_inside_the_models(name: str) -> None:
    sizes = {"width": D, "heads": 5, "feed_forward": 11, "dropout": 0.0}

    def make(position: nn.Module | None) -> nn.Module:
        return MAKE[name]()

    config = TransformerConfig(17, encoder_layers=1, decoder_layers=2, **sizes)
    model = Transformer(config, attention=make).double().eval()
    source, target = torch.randint(17, (2, 5)), torch.randint(17, (2, L))
    lengths = torch.tensor([5, 3]), torch.tensor([4, L])
    want = model(source, target, source_lengths=lengths[0], target_lengths=lengths[1])
    have = model(
        torch.cat([source[0], source[1, :3]])[None],
        torch.cat([target[0, :4], target[1]])[None],
        source_lengths=PackedLengths(lengths[0]),
        target_lengths=PackedLengths(lengths[1]),
    )
    close(have[0], torch.cat([want[0, :4], want[1]]))
    cache, memory = model.cache(), model.encode(source, lengths[0])
    steps = [
        model.decode(step, memory, source_lengths=lengths[0], cache=cache)
        for step in target.split(2, 1)
    ]
    close(torch.cat(steps, 1), want)

    language = LanguageModel(LanguageConfig(17, layers=2, **sizes), attention=make).double()
    cache = language.cache(11)
    steps = [language(step, cache=cache) for step in target.split(1, 1)]
    close(torch.cat(steps, 1), language(target))

    vision = VisionConfig(5, image=(4, 6), patch=2, channels=1, layers=2, **sizes)
    assert VisionTransformer(vision, attention=make)(torch.randn(2, 1, 4, 6)).shape == (2, 5)


@layers(MAKE | BOTH)
def test_living_with_it(make: Callable[[], Baseline]) -> None:
    layer, x = make(), torch.randn(B, L, D)
    twin = copy.deepcopy(layer)
    assert torch.equal(layer(x), twin(x))
    other = make()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    low = twin.to(torch.bfloat16)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), layer(x), atol=5e-2, rtol=5e-2)
    with torch.device("meta"):
        assert all(p.is_meta for p in make().parameters())


# --- What they cannot do

X = torch.zeros(2, L, D)


def filled(layer: Baseline) -> SelfCache:
    cache = SelfCache()
    layer(X, mask=causal(), cache=cache)
    return cache


REFUSALS: dict[str, tuple[Callable[[], object], *tuple[str, ...]]] = {
    "a source": (lambda: Recurrent(D)(X, X[:, :3]), r"\(2, 3, 10\)", "MultiHeadAttention"),
    "a window": (lambda: Recurrent(D)(X, mask=window(2)), r"window\(2, 2\)", r"causal\(\)"),
    "any mask": (
        lambda: Convolution(D, 3)(X, mask=Mask.from_tensor(torch.ones(L, L, dtype=torch.bool))),
        *(r"from_tensor\(1x1x7x7\)", "MultiHeadAttention every mask"),
    ),
    "an offset": (lambda: Dense(D, L)(X, mask=causal(2)), r"causal\(2\)", r"causal\(\)"),
    "either": (lambda: Dense(D, L)(X, mask=causal() | padding([2, 3])), r"\|", "every mask"),
    "two packings": (
        lambda: Recurrent(D)(X[:1], mask=packed([3, 4], [2, 5])),
        *(r"packed\(\[3, 4\], \[2, 5\]\)", r"packed\(lengths\)"),
    ),
    "both and causal": (
        lambda: Recurrent(D, both=True)(X, mask=causal()),
        *("both=True", r"causal\(\)", "both=False"),
    ),
    "both and a cache": (
        lambda: Recurrent(D, both=True)(X, cache=SelfCache()),
        *("both=True", "both=False"),
    ),
    "odd width": (lambda: Recurrent(7, both=True), r"\(7\)", "even", "8"),
    "unknown kind": (lambda: Recurrent(D, "rnn"), "'rnn'", "lstm, gru"),
    "groups": (lambda: Convolution(D, 3, groups=3), r"\(3\)", r"\(10\)", "5 or 10"),
    "kernel": (lambda: Convolution(D, 0), "kernel", r"\(0\)", "1 or more"),
    "length": (lambda: Dense(D, 0), "length", r"\(0\)", "1 or more"),
    "too long": (lambda: Dense(D, 5)(X), "7 positions", r"\(5\)", r"Dense\(10, 7\)"),
    "too much room": (
        lambda: Dense(D, 5)(X[:, :1], mask=causal(), cache=SelfCache(9)),
        *("9 positions", r"\(5\)", r"Dense\(10, 9\)"),
    ),
    "a cache that reads ahead": (
        lambda: Convolution(D, 3)(X, cache=SelfCache()),
        *("Convolution", r"mask=causal\(\)"),
    ),
    "a dense cache that reads ahead": (
        lambda: Dense(D, L)(X, cache=SelfCache()),
        *("Dense", r"mask=causal\(\)"),
    ),
    "lengths and a cache": (
        lambda: Recurrent(D)(X, mask=causal() & padding([2, 3]), cache=SelfCache()),
        *(r"padding\(\[2, 3\]\)", "still grow", r"pass causal\(\)"),
    ),
    "no such cache": (lambda: Recurrent(D)(X, cache=7), r"\(7\)", r"SelfCache\(\)"),
    "another's cache": (
        lambda: Recurrent(D, "gru")(X, mask=causal(), cache=filled(Recurrent(D))),
        *("values 10", "values 0", "one cache for each module"),
    ),
    "width": (lambda: Recurrent(D)(torch.zeros(2, 3, 5)), r"\(2, 3, 5\)", "width = 10"),
    "dtype": (lambda: Recurrent(D)(X.double()), "float64", "float32", "convert"),
    "too many lengths": (lambda: Recurrent(D)(X, mask=padding([1, 2, 3])), "3 lengths", "of 2"),
    "packed short": (lambda: Recurrent(D)(X[:1], mask=packed([2, 3])), "5", "7"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, *wanted = REFUSALS[name]
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        call()
    for words in wanted:
        assert caught.match(words)
