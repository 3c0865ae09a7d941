"""The same words as Hugging Face's `generate`, from the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.decode.engine.pick import open_session
from regard.decode.search.beam import beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.interop import read

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

SENTENCES, S, MOST = 200, 11, 13
PAD, END = 43, 0
SIZES: dict[str, Any] = {
    "vocab_size": 47,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 29,
    "max_position_embeddings": 31,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
    "eos_token_id": END,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Theirs, with random weights that end sentences at many lengths, and ours from its folder."""
    folder: Path = tmp_path_factory.mktemp("marian")
    torch.manual_seed(1)
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**SIZES)).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.3)
    theirs.final_logits_bias[:, END] = 1.0
    theirs.save_pretrained(folder)
    return theirs.double(), read(folder).model.double()


@pytest.fixture(scope="module")
def source() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, S + 1, (SENTENCES,), generator=generator)
    lengths[0] = S
    tokens = torch.randint(1, PAD, (SENTENCES, S), generator=generator)
    return tokens.masked_fill(torch.arange(S) >= lengths[:, None], PAD), lengths


def generated(model: Any, source: Any, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Their words, up to the end, and their scores."""
    tokens, lengths = source
    mask = (torch.arange(S) < lengths[:, None]).long()
    given = {"max_new_tokens": MOST, "bad_words_ids": [[PAD]], "do_sample": False} | options
    out = model.generate(
        tokens, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **given
    )
    rows = [row[1:] for row in out.sequences.tolist()]
    words = [row[: row.index(END)] if END in row else row for row in rows]
    return words, getattr(out, "sequences_scores", None)


def ours(search: Any, model: Any, source: Any, **options: Any) -> Any:
    session, prompts = open_session(model, *source), [[PAD]] * SENTENCES
    return search(session, prompts, end=END, max_length=MOST, banned=[PAD], **options)


def test_greedy(models: tuple[Any, Any], source: Any) -> None:
    words, _ = generated(models[0], source, num_beams=1)
    found: list[Hypothesis] = ours(greedy, models[1], source)
    assert [one.tokens for one in found] == words
    lengths = {len(one.tokens) for one in found}
    assert len(lengths) > 7  # sentences of many lengths
    assert {one.ended for one in found} == {True, False}


@pytest.mark.parametrize(("alpha", "renormalize"), [(1.0, False), (0.0, False), (0.6, True)])
def test_beam(models: tuple[Any, Any], source: Any, alpha: float, renormalize: bool) -> None:
    words, scores = generated(
        models[0],
        source,
        num_beams=4,
        num_return_sequences=2,
        length_penalty=alpha,
        early_stopping="never",
        renormalize_logits=renormalize,
    )
    options: dict[str, Any] = {"penalty": power(alpha), "renormalize": renormalize}
    found = ours(beam, models[1], source, width=4, n_best=2, **options)
    best = [one for hypotheses in found for one in hypotheses]
    torch.testing.assert_close(
        torch.tensor([one.score for one in best], dtype=torch.float64),
        scores.double(),
        atol=1e-5,
        rtol=1e-5,
    )
    # Where two are within rounding of each other (their scores are float32), either may be first.
    apart = [abs(a.score - b.score) > 1e-5 for a, b in found]
    assert sum(apart) > 0.95 * SENTENCES
    for n, sure in enumerate(apart):
        if sure:
            assert found[n][0].tokens == words[2 * n]
            assert found[n][1].tokens == words[2 * n + 1]
