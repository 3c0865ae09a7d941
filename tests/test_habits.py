"""Other libraries' words work, or the error names ours.

Each row is code, or a command, and what happens: another expression with the same result, or the
line of the error. The table of docs/coming-from.md is made of these rows;
`python -m tests.test_habits` writes it anew.
"""

import contextlib
import inspect
import io
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention.mask import Mask
from regard.cli.arguments import setting_names
from regard.cli.main import main
from regard.synonyms import SYNONYMS, first_word
from regard.task.specs import NAMES as TASKS
from regard.task.specs import spec

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
HEADING = "## What you type\n"


class Habit(NamedTuple):
    origin: str
    code: str
    """A Python expression, or a command."""
    result: str
    """The line of the error, or after `= ` an expression of the same value."""


FROM_TORCH = [
    (
        "attend(q, k, v, attn_mask=allowed)",
        "attend has no argument 'attn_mask'; use mask=attn_mask if it is boolean (True = may "
        "attend), else bias=attn_mask",
    ),
    ("attend(q, k, v, mask=allowed)", "= attend(q, k, v, mask=Mask.from_tensor(allowed))"),
    (
        "attend(q, k, v, mask=additive)",
        "mask is a torch.float32 tensor; pass values that are added to scores as bias=tensor, "
        "and 1 and 0 as tensor.bool()",
    ),
    (
        "attention_weights(q, k, v, mask=allowed)",
        "attention_weights got 'mask' by position and by name; its arguments in order are query, "
        "key, mask, beta, bias, rows",
    ),
    (
        "attention(x, x, x)",
        "MultiHeadAttention.forward takes x, source by position; pass others by name: value, mask, "
        "cache",
    ),
    (
        "Mask(lambda b, h, q, kv: q >= kv, 'causal')",
        "the rule of a Mask takes one argument; a mask_mod of FlexAttention is "
        "Mask(lambda at: mask_mod(at.batch, at.head, at.query, at.key), 'name')",
    ),
    ("attend(q, k, v, is_causal=True)", "attend has no argument 'is_causal'; use mask=causal()"),
    ("attend(q, k, v, scale=0.5)", "= attend(q, k, v, beta=0.5)"),
    ("attend(q, k, v, dropout_p=0.1)", "attend has no argument 'dropout_p'; did you mean dropout?"),
    (
        "attend(q, k, v, enable_gqa=True)",
        "attend has no argument 'enable_gqa'; leave it out, since fewer key heads are seen "
        "from the shapes",
    ),
    (
        "attend(q, k, v, score_mod=additive)",
        "attend has no argument 'score_mod'; did you mean bias?",
    ),
    ("attend(q, k, v, block_mask=None)", "attend has no argument 'block_mask'; did you mean mask?"),
    (
        "MultiHeadAttention(embed_dim=12, num_heads=3)",
        "MultiHeadAttention has no argument 'embed_dim'; did you mean width?",
    ),
    (
        "MultiHeadAttention(12, num_heads=3)",
        "MultiHeadAttention has no argument 'num_heads'; did you mean heads?",
    ),
    (
        "MultiHeadAttention(12, 3, batch_first=True)",
        "MultiHeadAttention has no argument 'batch_first'; leave it out, since batches always "
        "come first",
    ),
    (
        "MultiHeadAttention(12, 3, kdim=7)",
        "MultiHeadAttention has no argument 'kdim'; did you mean source_width?",
    ),
    (
        "MultiHeadAttention(12, 3, vdim=7)",
        "MultiHeadAttention has no argument 'vdim'; did you mean value_source_width?",
    ),
    (
        "MultiHeadAttention(12, 3, add_zero_attn=True)",
        "MultiHeadAttention has no argument 'add_zero_attn'; leave it out, since no key is "
        "added to the source's",
    ),
    (
        "attention(x, key_padding_mask=~real)",
        "MultiHeadAttention.forward has no argument 'key_padding_mask'; use "
        "mask=padding(~key_padding_mask): here True means a real token",
    ),
    (
        "attention(x, attn_mask=hidden)",
        "MultiHeadAttention.forward has no argument 'attn_mask'; use mask=~attn_mask: here "
        "True means may attend",
    ),
    (
        "attention(x, need_weights=True)",
        "MultiHeadAttention.forward has no argument 'need_weights'; weights are computed on "
        "demand: with record(model) as recording",
    ),
    ("attention(x, mask=square)", "= attention(x, mask=Mask.from_tensor(square))"),
    (
        "TransformerConfig(100, d_model=256)",
        "TransformerConfig has no argument 'd_model'; did you mean width?",
    ),
    (
        "TransformerConfig(100, nhead=4)",
        "TransformerConfig has no argument 'nhead'; did you mean heads?",
    ),
    (
        "TransformerConfig(100, dim_feedforward=1024)",
        "TransformerConfig has no argument 'dim_feedforward'; did you mean feed_forward?",
    ),
    (
        "TransformerConfig(100, num_encoder_layers=3)",
        "TransformerConfig has no argument 'num_encoder_layers'; did you mean encoder_layers?",
    ),
    (
        "TransformerConfig(100, norm_first=True)",
        "TransformerConfig has no argument 'norm_first'; use norm='pre'",
    ),
    (
        "TransformerConfig(100, layer_norm_eps=1e-6)",
        "TransformerConfig has no argument 'layer_norm_eps'; did you mean epsilon?",
    ),
    (
        "Transformer(d_model=512, nhead=8)",
        "Transformer has no argument 'd_model'; it belongs to the config: "
        "TransformerConfig(…, width=…)",
    ),
    ("Transformer.tiny(100, norm='pre').config.norm", "= 'pre'"),
    (
        "transformer(source, target, src_key_padding_mask=~real)",
        "Transformer.forward has no argument 'src_key_padding_mask'; use "
        "source_lengths=(~src_key_padding_mask).sum(-1)",
    ),
    (
        "transformer(source, target, tgt_mask=square)",
        "Transformer.forward has no argument 'tgt_mask'; leave it out, since a model makes "
        "its masks from lengths and its config",
    ),
    (
        "transformer(src=source, tgt=target)",
        "Transformer.forward has no argument 'src'; did you mean source?",
    ),
    (
        "attention.load_state_dict(nn.MultiheadAttention(12, 3).state_dict())",
        "the state dict holds 'in_proj_weight', as another library names it; read it by "
        "regard.interop.torch_nn.attention(state, heads=…)",
    ),
    (
        "transformer(source, target[:1].repeat(3, 1))",
        "source has 2 sentences and target has 3; pass one source for each target",
    ),
    (
        "transformer(source[0], target[0])",
        "source of shape (5,) must be a batch; use source[None]",
    ),
    (
        "transformer([[1, 2]], target)",
        "source must be a tensor, got [[1, 2]]; use torch.tensor([ids])",
    ),
    (
        "transformer(source, target.float())",
        "target must be token ids, int64 or int32, of shape (batch, length), got torch.float32 of "
        "shape (2, 7); pass target.long()",
    ),
    (
        "load('run', map_location='cpu')",
        "load has no argument 'map_location'; did you mean device?",
    ),
]
FROM_HF = [
    ("padding(attention_mask)", "= padding([3, 5])"),
    (
        "padding(attention_mask.flip(1))",
        "padding: row 0 of the mask is [0, 0, 1, 1, 1], which is not padded on the right; for "
        "any other pattern use Mask.from_tensor(mask.bool()[:, None, None, :])",
    ),
    (
        "attention(x, output_attentions=True)",
        "MultiHeadAttention.forward has no argument 'output_attentions'; weights are computed "
        "on demand: with record(model) as recording",
    ),
    (
        "transformer(input_ids=source)",
        "Transformer.forward has no argument 'input_ids'; did you mean source?",
    ),
    (
        "transformer(source, target, attention_mask=attention_mask)",
        "Transformer.forward has no argument 'attention_mask'; use "
        "source_lengths=attention_mask.sum(-1) if it is padded on the right",
    ),
    (
        "transformer(source, target, labels=target)",
        "Transformer.forward has no argument 'labels'; the model returns logits; compute the "
        "loss from them",
    ),
    (
        "LanguageConfig(100, hidden_size=64)",
        "LanguageConfig has no argument 'hidden_size'; did you mean width?",
    ),
    (
        "LanguageConfig(100, num_hidden_layers=2)",
        "LanguageConfig has no argument 'num_hidden_layers'; did you mean layers?",
    ),
    (
        "LanguageConfig(100, num_key_value_heads=2)",
        "LanguageConfig has no argument 'num_key_value_heads'; did you mean key_heads?",
    ),
    (
        "LanguageConfig(vocab_size=100)",
        "LanguageConfig has no argument 'vocab_size'; did you mean vocabulary?",
    ),
    (
        "LanguageModel.tiny(100, context=512)",
        "LanguageModel.tiny has no argument 'context'; did you mean length?",
    ),
    (
        "TextClassifier.tiny(100, classes=2)",
        "TextClassifier.tiny got 'classes' by position and by name; its arguments in order are "
        "classes, vocabulary",
    ),
    (
        "LanguageConfig(100, max_position_embeddings=512)",
        "LanguageConfig has no argument 'max_position_embeddings'; did you mean length?",
    ),
    (
        "TransformerConfig(100, num_layers=6)",
        "TransformerConfig has no argument 'num_layers'; did you mean encoder_layers and "
        "decoder_layers?",
    ),
    (
        "EncoderConfig(100, hidden_dropout_prob=0.1)",
        "EncoderConfig has no argument 'hidden_dropout_prob'; did you mean dropout?",
    ),
    (
        "TextClassifier.tiny(num_labels=2, vocabulary=100)",
        "TextClassifier.tiny has no argument 'num_labels'; did you mean classes?",
    ),
    (
        "TrainingConfig(learning_rate=3e-4)",
        "TrainingConfig has no argument 'learning_rate'; did you mean lr?",
    ),
    (
        "TrainingConfig(gradient_accumulation_steps=4)",
        "TrainingConfig has no argument 'gradient_accumulation_steps'; did you mean accumulate?",
    ),
    (
        "TrainingConfig(max_steps=100)",
        "TrainingConfig has no argument 'max_steps'; did you mean steps?",
    ),
    (
        "fit(task, lr=3e-4)",
        "fit has no argument 'lr'; it belongs to the config: TrainingConfig(…, lr=…)",
    ),
    (
        "load('run', torch_dtype=torch.float16)",
        "load has no argument 'torch_dtype'; did you mean dtype?",
    ),
    (
        "translator.translate(texts, num_beams=4)",
        "Translator.translate has no argument 'num_beams'; did you mean beams?",
    ),
    (
        "translator.translate(texts, num_return_sequences=3)",
        "Translator.translate has no argument 'num_return_sequences'; "
        "call hypotheses(texts, n_best=…)",
    ),
    (
        "generator.generate(texts, max_new_tokens=50)",
        "Generator.generate has no argument 'max_new_tokens'; did you mean length?",
    ),
    (
        "generator.generate(texts, do_sample=False)",
        "Generator.generate has no argument 'do_sample'; use temperature=0 for greedy search",
    ),
    (
        "Translator.load('run', torch_dtype=torch.float16)",
        "Predictor.load has no argument 'torch_dtype'; did you mean dtype?",
    ),
    (
        "regard translate RUN --num-return-sequences 3",
        "--num-return-sequences is unknown; did you mean --n-best? See regard translate --help",
    ),
    (
        "regard translate RUN --num-beams 4",
        "--num-beams is unknown; did you mean --beams? See regard translate --help",
    ),
    (
        "regard generate RUN --max-new-tokens 50",
        "--max-new-tokens is unknown; did you mean --length? See regard generate --help",
    ),
    (
        "regard train translate RUN --hidden-size 256",
        "--hidden-size is unknown; did you mean --model.width? See regard train translate --help",
    ),
]
FROM_TIMM = [
    (
        "VisionTransformer.tiny(num_classes=10)",
        "VisionTransformer.tiny has no argument 'num_classes'; did you mean classes?",
    ),
    (
        "VisionTransformer.tiny(10, img_size=32)",
        "VisionTransformer.tiny has no argument 'img_size'; did you mean image?",
    ),
    (
        "VisionTransformer.tiny(10, patch_size=4)",
        "VisionTransformer.tiny has no argument 'patch_size'; did you mean patch?",
    ),
    (
        "VisionTransformer.tiny(10, in_chans=1)",
        "VisionTransformer.tiny has no argument 'in_chans'; did you mean channels?",
    ),
    (
        "VisionTransformer.tiny(10, 32, 4, drop_rate=0.1)",
        "VisionTransformer.tiny has no argument 'drop_rate'; did you mean dropout?",
    ),
    (
        "VisionTransformer.tiny(10, 32, 4)(torch.zeros(3, 32, 32))",
        "images of shape (3, 32, 32) must be (batch, 3, 32, 32); one image is images[None]",
    ),
    (
        "VisionTransformer.tiny(10, 32, 4)(torch.zeros(2, 1, 32, 32))",
        "images of shape (2, 1, 32, 32) must be (batch, 3, 32, 32); convert them, or build the "
        "model with channels=…",
    ),
    ("VisionTransformer.tiny(10, 32, 4, dropout=0.1).config.dropout", "= 0.1"),
    (
        "VisionConfig(10, embed_dim=192)",
        "VisionConfig has no argument 'embed_dim'; did you mean width?",
    ),
    ("VisionConfig(10, depth=4)", "VisionConfig has no argument 'depth'; did you mean layers?"),
    (
        "VisionConfig(10, mlp_ratio=4)",
        "VisionConfig has no argument 'mlp_ratio'; use feed_forward=mlp_ratio * width",
    ),
    (
        "VisionConfig(10, global_pool='avg')",
        "VisionConfig has no argument 'global_pool'; did you mean pool?",
    ),
    (
        "VisionTransformer.base(1000, pretrained=True)",
        "VisionTransformer.base has no argument 'pretrained'; import weights by regard import "
        "SOURCE FOLDER, then load(FOLDER)",
    ),
]
FROM_X_TRANSFORMERS = [
    (
        "LanguageConfig(num_tokens=100)",
        "LanguageConfig has no argument 'num_tokens'; did you mean vocabulary?",
    ),
    ("LanguageConfig(100, dim=64)", "LanguageConfig has no argument 'dim'; did you mean width?"),
    (
        "LanguageConfig(100, max_seq_len=512)",
        "LanguageConfig has no argument 'max_seq_len'; did you mean length?",
    ),
    (
        "LanguageConfig(100, rotary_pos_emb=True)",
        "LanguageConfig has no argument 'rotary_pos_emb'; use position='rotary'",
    ),
    (
        "TransformerConfig(100, enc_depth=6)",
        "TransformerConfig has no argument 'enc_depth'; did you mean encoder_layers?",
    ),
    (
        "MultiHeadAttention(12, 3, dim_head=4)",
        "MultiHeadAttention has no argument 'dim_head'; did you mean key_width?",
    ),
    (
        "attention(x, context=memory)",
        "MultiHeadAttention.forward has no argument 'context'; did you mean source?",
    ),
]
FROM_KERAS = [
    (
        "MultiHeadAttention(12, 3, key_dim=4)",
        "MultiHeadAttention has no argument 'key_dim'; did you mean key_width?",
    ),
    (
        "attention(x, use_causal_mask=True)",
        "MultiHeadAttention.forward has no argument 'use_causal_mask'; use mask=causal()",
    ),
    (
        "attention(x, return_attention_scores=True)",
        "MultiHeadAttention.forward has no argument 'return_attention_scores'; weights are "
        "computed on demand: with record(model) as recording",
    ),
    ("attention(query=x)", "MultiHeadAttention.forward has no argument 'query'; did you mean x?"),
    (
        "TrainingConfig(batch_size=64)",
        "TrainingConfig has no argument 'batch_size'; did you mean batch?",
    ),
]
FROM_FAIRSEQ = [
    (
        "TransformerConfig(100, encoder_embed_dim=256)",
        "TransformerConfig has no argument 'encoder_embed_dim'; did you mean width?",
    ),
    (
        "TransformerConfig(100, encoder_ffn_embed_dim=1024)",
        "TransformerConfig has no argument 'encoder_ffn_embed_dim'; did you mean feed_forward?",
    ),
    (
        "TransformerConfig(100, share_all_embeddings=True)",
        "TransformerConfig has no argument 'share_all_embeddings'; use share='all'",
    ),
    (
        "TrainingConfig(warmup_updates=4000)",
        "TrainingConfig has no argument 'warmup_updates'; did you mean warmup?",
    ),
    (
        "TrainingConfig(label_smoothing=0.1)",
        "TrainingConfig has no argument 'label_smoothing'; did you mean smoothing?",
    ),
    (
        "transformer(source, target, src_lengths=torch.tensor([3, 5]))",
        "Transformer.forward has no argument 'src_lengths'; did you mean source_lengths?",
    ),
    (
        "regard train translate RUN --update-freq 4",
        "--update-freq is unknown; did you mean --training.accumulate? See regard train "
        "translate --help",
    ),
    (
        "regard train translate RUN --encoder-embed-dim 256",
        "--encoder-embed-dim is unknown; did you mean --model.width? "
        "See regard train translate --help",
    ),
    (
        "regard translate RUN --beam 5",
        "--beam is unknown; did you mean --beams? See regard translate --help",
    ),
]
FROM_CTRANSLATE2 = [
    (
        "translator.translate(texts, beam_size=4)",
        "Translator.translate has no argument 'beam_size'; did you mean beams?",
    ),
    (
        "translator.translate(texts, max_batch_size=32)",
        "Translator.translate has no argument 'max_batch_size'; did you mean batch?",
    ),
    (
        "regard translate RUN --beam-size 4",
        "--beam-size is unknown; did you mean --beams? See regard translate --help",
    ),
    (
        "regard translate RUN --num-hypotheses 4",
        "--num-hypotheses is unknown; did you mean --n-best? See regard translate --help",
    ),
    (
        "regard translate RUN --max-batch-size 32",
        "--max-batch-size is unknown; did you mean --batch? See regard translate --help",
    ),
    (
        "regard generate RUN --sampling-temperature 0.5",
        "--sampling-temperature is unknown; did you mean --temperature? See regard generate --help",
    ),
]
FROM_MARIAN = [
    (
        "regard train translate RUN --optimizer-delay 2",
        "--optimizer-delay is unknown; did you mean --training.accumulate? See regard train "
        "translate --help",
    ),
    (
        "regard train translate RUN --exponential-smoothing",
        "--exponential-smoothing is unknown; did you mean --training.ema? See regard train "
        "translate --help",
    ),
    (
        "regard train translate RUN --ff-size 1024",
        "--ff-size is unknown; did you mean --model.feed-forward? See regard train translate "
        "--help",
    ),
]
MISSPELT = [
    ("attend(q, k, v, mas=causal())", "attend has no argument 'mas'; did you mean mask?"),
    (
        "attend(q, k, v, colour=1)",
        "attend has no argument 'colour'; its arguments are query, key, value, mask, beta, "
        "bias, dropout, backend, scale",
    ),
    (
        "record(transformer, selected=None)",
        "record has no argument 'selected'; did you mean select?",
    ),
    (
        "save(transformer, 'run')",
        "save(folder, model) takes a torch.nn.Module, not str; of a predictor save its .model",
    ),
    (
        "load(['run', 'other'])",
        "folder (['run', 'other']) must be a path; an ensemble is load(*folders)",
    ),
    (
        "load('run', device='gpu')",
        'device ("gpu") is not one that torch knows; choose auto, cpu, cuda, or one of several '
        "GPUs, such as cuda:1",
    ),
    (
        "Concatenated(32)",
        "Concatenated (32) needs positions; for example Concatenated(SinusoidalPositions(32))",
    ),
    (
        "Supervised(transformer, (source, source), (source, source), loss='mse', score=max)",
        "loss ('mse') must be a function of outputs and targets, such as "
        "torch.nn.functional.cross_entropy",
    ),
    (
        "save(directory='run', model=transformer)",
        "save has no argument 'directory'; did you mean folder?",
    ),
]

HABITS = [
    Habit(origin, *row)
    for origin, rows in {
        "PyTorch": FROM_TORCH,
        "Hugging Face": FROM_HF,
        "timm": FROM_TIMM,
        "x-transformers": FROM_X_TRANSFORMERS,
        "Keras": FROM_KERAS,
        "fairseq": FROM_FAIRSEQ,
        "CTranslate2": FROM_CTRANSLATE2,
        "Marian, JoeyNMT": FROM_MARIAN,
        "misspelt": MISSPELT,
    }.items()
    for row in rows
]


def names() -> dict[str, Any]:
    """The public names, and the variables of the rows."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 11)
    small = {"width": 12, "heads": 3, "feed_forward": 17, "encoder_layers": 1, "decoder_layers": 1}
    square = torch.ones(5, 5).tril().bool()
    attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    return {
        **{name: getattr(regard, name) for name in regard.__all__},
        "torch": torch,
        "nn": nn,
        "q": q,
        "k": k,
        "v": v,
        "x": torch.randn(2, 5, 12),
        "allowed": square,
        "square": square,
        "hidden": ~square,
        "task": None,
        "additive": torch.zeros(5, 5),
        "memory": torch.randn(2, 7, 12),
        "attention_mask": attention_mask,
        "real": attention_mask.bool(),
        "attention": regard.MultiHeadAttention(12, 3).eval(),
        "transformer": regard.Transformer.tiny(19, **small).eval(),
        "texts": ["A dog."],
        "translator": object.__new__(regard.Translator),
        "generator": object.__new__(regard.Generator),
        "source": torch.randint(19, (2, 5)),
        "target": torch.randint(19, (2, 7)),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Mask):
        return str(a) == str(b)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: f"{habit.origin}: {habit.code}")
def test_habit(habit: Habit) -> None:
    if habit.code.startswith("regard "):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            assert main(shlex.split(habit.code)[1:]) == 2
        assert errors.getvalue() == f"regard: {habit.result}\n"
    elif habit.result.startswith("= "):
        space = names()
        assert same(eval(habit.code, space), eval(habit.result.removeprefix("= "), space))
    else:
        with pytest.raises((TypeError, ValueError)) as caught:
            eval(habit.code, names())
        assert str(caught.value) == habit.result


WITHOUT = {
    "AttentionStatistics",
    "check",
    "Predictor",
    "DotScore",
    "ScaledDotScore",
    "AlignmentScore",
    "Mask",
    "masks",
}
"""Names that take no arguments, are not called, or pass their keywords on."""


@pytest.mark.parametrize("name", sorted({*regard.__all__} - WITHOUT - {"__version__"}))
def test_every_public_name_explains_an_unknown_argument(name: str) -> None:
    public = getattr(regard, name)
    with pytest.raises(TypeError, match=rf"^{name} has no argument 'nonsense'; .*\w"):
        public(nonsense=1)
    assert "nonsense" not in str(inspect.signature(public))
    assert "kwargs" not in str(inspect.signature(public))


def test_every_synonym_names_an_argument_or_a_setting() -> None:
    """A remedy that was renamed here would be a wrong one."""
    names = {
        *("memory_mask", "n_best", "top", "workers"),  # of a Block, and of commands
        *(path.rpartition(".")[2] for task in TASKS for path in setting_names(spec(task).config)),
    }
    for public in (getattr(regard, name) for name in regard.__all__):
        for function in (public, *(vars(public).values() if isinstance(public, type) else ())):
            with contextlib.suppress(TypeError, ValueError):
                names |= set(inspect.signature(getattr(function, "__func__", function)).parameters)
    remedies = [part for ours in SYNONYMS.values() for part in ours.split(" | ")]
    unknown = {part for part in remedies if part[0] != ":" and first_word(part) not in names}
    assert not unknown


def table() -> str:
    """The rows as docs/coming-from.md shows them."""
    lines = ["| from | what you type | what happens |", "|---|---|---|"]
    for origin, code, result in HABITS:
        happens = f"the same as `{result[2:]}`" if result.startswith("= ") else result
        lines.append(f"| {origin} | `{code}` | {happens} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_shows_these_rows() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition(HEADING)[2]
    assert table() in shown, "python -m tests.test_habits writes the table anew"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
    introduction = "Other libraries' words work, or the error names ours."
    PAGE.write_text(f"{page}\n\n{HEADING}\n{introduction}\n\n{table()}", encoding="utf-8")
