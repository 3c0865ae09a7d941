"""Other libraries' words for Regard's arguments and flags, and the errors that name ours.

    attend(q, k, v, is_causal=True)     attend has no argument 'is_causal'; use mask=causal()
    regard translate RUN --num-beams 4  --num-beams is unknown; did you mean --beams?

`SYNONYMS` serves Python, through `suggest_names`, and the command line, through
`regard.machine.command_line`.
"""

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS, unwrap
from types import FunctionType
from typing import Any, TypeVar

Target = TypeVar("Target", bound=Callable[..., Any])

SYNONYMS: dict[str, str] = {
    # Masks and scores
    "attn_mask": "mask=attn_mask if it is boolean (True = may attend), else bias=attn_mask",
    "MultiHeadAttention.forward.attention_mask": "mask=padding(attention_mask) if it is (B, S), or "
    "mask=attention_mask.bool()",
    "MultiHeadAttention.forward.attn_mask": "mask=~attn_mask: here True means may attend",
    "is_causal": "mask=causal()",
    "causal": "mask=causal()",
    "use_causal_mask": "mask=causal()",
    "key_padding_mask": "mask=padding(~key_padding_mask): here True means a real token",
    "key_mask": "mask=padding(key_mask)",
    "src_mask": "mask | : leave it out, since a model makes its masks from lengths and its config",
    "tgt_mask": "mask | : leave it out, since a model makes its masks from lengths and its config",
    "attention_mask": "source_lengths=attention_mask.sum(-1) if it is padded on the right | "
    "lengths=attention_mask.sum(-1) if it is padded on the right | "
    "mask=padding(attention_mask)",
    "decoder_attention_mask": "target_lengths=decoder_attention_mask.sum(-1)",
    "src_key_padding_mask": "source_lengths=(~src_key_padding_mask).sum(-1) | "
    "lengths=(~src_key_padding_mask).sum(-1) | mask=padding(~src_key_padding_mask)",
    "tgt_key_padding_mask": "target_lengths=(~tgt_key_padding_mask).sum(-1) | "
    "mask=padding(~tgt_key_padding_mask)",
    "memory_key_padding_mask": "source_lengths=(~memory_key_padding_mask).sum(-1) | "
    "memory_mask=padding(~memory_key_padding_mask)",
    "block_mask": "mask",
    "attention_bias": "bias",
    "attn_bias": "bias",
    "score_mod": "bias",
    "position_bias": "bias",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "temperature": "scale=1 / temperature",
    "scale": "beta",
    "window_size": "mask=window(window_size) | window | left",
    "sliding_window": "mask=window(sliding_window, 0) | window",
    "attention_window": "window",
    "enable_gqa": ": leave it out, since fewer key heads are seen from the shapes",
    "attend.need_weights": ": attention_weights(query, key) returns the weights",
    "attend.return_weights": ": attention_weights(query, key) returns the weights",
    **dict.fromkeys(
        (
            "average_attn_weights",
            "need_weights",
            "output_attentions",
            "return_attention",
            "return_attention_scores",
            "return_attn",
            "return_weights",
        ),
        ": weights are computed on demand: with record(model) as recording",
    ),
    "q": "query",
    "k": "key",
    "v": "value",
    "MultiHeadAttention.forward.query": "x",
    "MultiHeadAttention.forward.key": "source",
    "context": "source | length",
    "encoder_hidden_states": "source | memory",
    "hidden_states": "x | query",
    # What models read
    "input_ids": "source | tokens",
    "src": "source",
    "src_tokens": "source",
    "inputs": "source | tokens | images",
    "tgt": "target",
    "trg": "target",
    "decoder_input_ids": "target",
    "prev_output_tokens": "target",
    "pixel_values": "images | source",
    "src_lengths": "source_lengths | lengths",
    "src_length": "source_lengths | lengths",
    "trg_length": "target_lengths",
    "labels": ": the model returns logits; compute the loss from them",
    "past_key_values": "cache=model.cache()",
    "use_cache": "cache=model.cache()",
    "incremental_state": "cache=model.cache()",
    # Sizes of models
    "d_model": "width",
    "dim": "width",
    "emb_dim": "width",
    "embed_dim": "width",
    "embedding_dim": "width",
    "encoder_embed_dim": "width",
    "hidden_dim": "width",
    "hidden_size": "width",
    "model_dim": "width",
    "n_embd": "width",
    "head_dim": "key_width | : the width of a head is width / heads",
    "dim_head": "key_width | : the width of a head is width / heads",
    "key_dim": "key_width",
    "value_dim": "value_width",
    "kdim": "source_width",
    "vdim": "value_source_width",
    "attention_heads": "heads",
    "encoder_attention_heads": "heads",
    "n_head": "heads",
    "n_heads": "heads",
    "nhead": "heads",
    "num_attention_heads": "heads",
    "num_heads": "heads",
    "kv_heads": "key_heads",
    "n_kv_heads": "key_heads",
    "num_key_value_heads": "key_heads",
    "num_kv_heads": "key_heads",
    "depth": "layers | encoder_layers and decoder_layers",
    "n_layer": "layers | encoder_layers and decoder_layers",
    "n_layers": "layers | encoder_layers and decoder_layers",
    "num_blocks": "layers | encoder_layers and decoder_layers",
    "num_hidden_layers": "layers | encoder_layers and decoder_layers",
    "num_layers": "layers | encoder_layers and decoder_layers",
    "layers": "encoder_layers and decoder_layers",
    "enc_depth": "encoder_layers",
    "num_encoder_layers": "encoder_layers | layers",
    "dec_depth": "decoder_layers",
    "num_decoder_layers": "decoder_layers | layers",
    "d_ff": "feed_forward",
    "dff": "feed_forward",
    "dim_feedforward": "feed_forward",
    "encoder_ffn_dim": "feed_forward",
    "encoder_ffn_embed_dim": "feed_forward",
    "ff_dim": "feed_forward",
    "ff_size": "feed_forward",
    "ffn_dim": "feed_forward",
    "intermediate_dim": "feed_forward",
    "intermediate_size": "feed_forward",
    "mlp_dim": "feed_forward",
    "n_inner": "feed_forward",
    "decoder_ffn_dim": "decoder_feed_forward",
    "decoder_ffn_embed_dim": "decoder_feed_forward",
    "ff_mult": "feed_forward=ff_mult * width",
    "mlp_ratio": "feed_forward=mlp_ratio * width",
    "attention_dropout_rate": "attention_dropout | dropout",
    "attention_probs_dropout_prob": "attention_dropout | dropout",
    "attn_drop": "attention_dropout | dropout",
    "attn_dropout": "attention_dropout | dropout",
    "attn_pdrop": "attention_dropout | dropout",
    "activation_dropout": "hidden_dropout",
    "ff_dropout": "hidden_dropout",
    "relu_dropout": "hidden_dropout",
    "drop_path_rate": ": there is no stochastic depth; use dropout",
    "drop_rate": "dropout",
    "dropout_p": "dropout",
    "dropout_rate": "dropout",
    "hidden_dropout_prob": "dropout",
    "proj_drop": "dropout",
    "resid_pdrop": "dropout",
    "layer_norm_eps": "epsilon",
    "layer_norm_epsilon": "epsilon",
    "norm_eps": "epsilon",
    "encoder_normalize_before": "norm='pre'",
    "norm_first": "norm='pre'",
    "pre_norm": "norm='pre'",
    "activation_function": "activation",
    "hidden_act": "activation",
    "act_layer": "activation",
    "batch_first": ": leave it out, since batches always come first",
    "qkv_bias": "bias",
    "use_bias": "bias",
    "add_bias_kv": ": leave it out, since no key is added to the source's",
    "add_zero_attn": ": leave it out, since no key is added to the source's",
    "in_chans": "channels",
    "in_channels": "channels",
    "num_channels": "channels",
    "num_mel_bins": "features",
    "input_feat_per_channel": "features",
    "img_size": "image",
    "image_size": "image",
    "patch_size": "patch",
    "global_pool": "pool",
    "n_classes": "classes",
    "num_classes": "classes",
    "num_labels": "classes",
    "n_vocab": "vocabulary",
    "ntoken": "vocabulary",
    "num_tokens": "vocabulary",
    "src_vocab_size": "source=TextSource(vocabulary=src_vocab_size) | vocabulary",
    "tgt_vocab_size": "vocabulary",
    "vocab_size": "vocabulary",
    "block_size": "length | context",
    "max_len": "length | capacity | longest",
    "max_length": "length | capacity | longest",
    "max_cache_len": "capacity",
    "max_position_embeddings": "length",
    "max_seq_len": "length | context",
    "n_positions": "length",
    "num_embeddings": "length | vocabulary",
    "rope_theta": "base",
    "theta": "base",
    "pos_embed": "position",
    "pos_enc": "position",
    "position_embedding_type": "position",
    "positional_encoding": "position",
    "rotary_pos_emb": "position='rotary'",
    "use_rope": "position='rotary'",
    "share_all_embeddings": "share='all'",
    "share_embeddings": "share",
    "share_decoder_input_output_embed": "share='target'",
    "tie_weights": "share",
    "tie_word_embeddings": "share",
    "tied_embeddings": "share",
    "tied_embeddings_all": "share='all'",
    "pretrained": ": import weights by regard import SOURCE FOLDER, then load(FOLDER)",
    # Search and prediction
    "beam": "beams",
    "beam_size": "beams",
    "beam_width": "beams",
    "num_beams": "beams",
    "nbest": "n_best | : call hypotheses(texts, n_best=…)",
    "num_hypotheses": "n_best | : call hypotheses(texts, n_best=…)",
    "num_return_sequences": "n_best | : call hypotheses(texts, n_best=…)",
    "beam_alpha": "length_penalty",
    "lenpen": "length_penalty",
    "max_new_tokens": "length",
    "max_gen_len": "length",
    "do_sample": "temperature=0 for greedy search",
    "sampling_temperature": "temperature",
    "sampling_topk": "top_k",
    "sampling_topp": "top_p",
    "topk": "top_k | top",
    "topp": "top_p",
    # Training
    "batch_size": "batch",
    "max_batch_size": "batch",
    "max_tokens": "length | batch",
    "mini_batch": "batch",
    "per_device_train_batch_size": "batch",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "optimizer_delay": "accumulate",
    "update_freq": "accumulate",
    "learning_rate": "lr",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "scheduler": "schedule",
    "num_warmup_steps": "warmup",
    "warmup_steps": "warmup",
    "warmup_updates": "warmup",
    "optim": "optimizer",
    "adam_betas": "betas",
    "adam_epsilon": "epsilon",
    "label_smoothing": "smoothing",
    "label_smoothing_factor": "smoothing",
    "clip_grad": "clip",
    "clip_norm": "clip",
    "gradient_clip_val": "clip",
    "max_grad_norm": "clip",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "max_update": "steps",
    "train_steps": "steps",
    "bf16": "precision='bf16'",
    "fp16": "precision='fp16'",
    "exponential_smoothing": "ema",
    "model_ema": "ema",
    "eval_steps": "evaluate_every",
    "valid_freq": "evaluate_every",
    "validation_freq": "evaluate_every",
    "save_steps": "save_every",
    "logging_steps": "log_every",
    "early_stopping": "patience",
    "early_stopping_patience": "patience",
    "report_to": "tracker",
    "torch_compile": "compile",
    "num_workers": "workers",
    "args": "config",
    "training_args": "config",
    "directory": "folder",
    "output_dir": "folder",
    "save_directory": "folder",
    "path": "folder",
    "pretrained_model_name_or_path": "folder",
    "train_data": "train",
    "train_dataset": "task=Supervised(model, train, valid, …) | train",
    "eval_dataset": "valid",
    "val_data": "valid",
    "validation_data": "valid",
    "loss_fn": "loss",
    "criterion": "loss",
    "metric": "score",
    "metrics": "score",
    "device_map": "device",
    "map_location": "device",
    "torch_dtype": "dtype",
    "weights_only": ": leave it out, since nothing is unpickled",
}
"""Another library's word: ours, the first of those separated by `|` that the function has.

After ours the text may go on: with `=`, `and` or `,`. A remedy that begins with a colon stands for
no argument. `Class.function.word` is the word in that function alone.
"""


def suggest_names(target: Target, methods: Collection[str] = ("__init__", "forward")) -> Target:
    """Makes a function's TypeError for a wrong argument name the argument it has.

    Of a class its class methods are changed and those of `methods` that it defines. The signature
    stays as it is, for `help`, `inspect` and type checkers.
    """
    if not isinstance(target, type):
        return _wrap(target, target.__qualname__)
    for name, member in list(vars(target).items()):
        function = getattr(member, "__func__", member)
        if isinstance(member, classmethod):
            wrapped = _wrap(function, f"{target.__name__}.{name}", _settings(target))
            setattr(target, name, classmethod(wrapped))
        elif isinstance(function, FunctionType) and name in methods:
            label = target.__name__ + ("" if name == "__init__" else f".{name}")
            setattr(target, name, _wrap(function, label))
    return target


def _wrap(function: Any, label: str, settings: Collection[str] = ()) -> Any:
    """The function, whose error names an unknown keyword; `settings` are those of its `**`."""
    code = unwrap(function).__code__
    if code.co_flags & CO_VARKEYWORDS and not settings:
        return function
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = [name for name in parameters if name not in ("self", "cls")]
    if code.co_flags & CO_VARKEYWORDS:
        names += [name for name in settings if name not in names]
    allowed = frozenset(names)
    ordered = parameters[: code.co_argcount]
    in_order = ", ".join(name for name in ordered if name not in ("self", "cls"))
    by_name = ", ".join(parameters[code.co_argcount :])
    most = len(ordered) if by_name and not code.co_flags & CO_VARARGS else sys.maxsize

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > most:
            raise TypeError(
                f"{label} takes {in_order or 'no arguments'} by position; "
                f"pass others by name: {by_name}"
            )
        for name in kwargs:
            if name in ordered[: len(args)]:
                raise TypeError(
                    f"{label} got {name!r} by position and by name; "
                    f"its arguments in order are {in_order}"
                )
            if name not in allowed:
                remedy = _remedy(name, label, names, function)
                raise TypeError(f"{label} has no argument {name!r}; {remedy}")
        return function(*args, **kwargs)

    return call


def _settings(kind: type) -> list[str]:
    """The fields of a config, or of the config of a model."""
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    constructor = vars(kind)["__init__"]
    return [name for config in _configs(constructor) for name in _settings(config)]


def _configs(function: Any) -> list[type]:
    """The dataclasses that a function takes."""
    annotations = unwrap(function).__annotations__.items()
    return [
        kind
        for name, kind in annotations
        if name != "return" and isinstance(kind, type) and is_dataclass(kind)
    ]


def _remedy(word: str, label: str, names: Sequence[str], function: Any) -> str:
    """Names the argument to write in place of an unknown one."""
    if ours := synonym(word, names, label):
        if ours.startswith(": "):
            return ours.removeprefix(": ")
        return f"use {ours}" if "=" in ours else f"did you mean {ours}?"
    for config in _configs(function):
        inside = _settings(config)
        ours = word if word in inside else first_word(synonym(word, inside) or "")
        if ours in inside:
            return f"it belongs to the config: {config.__name__}(…, {ours}=…)"
    near = names if len(names) == 1 else difflib.get_close_matches(word, names, 1)
    return f"did you mean {near[0]}?" if near else f"its arguments are {', '.join(names)}"


def synonym(word: str, names: Iterable[str], label: str = "") -> str | None:
    """Ours for another library's word, where it is among these names; or a remedy after a colon."""
    names = set(names)
    word = word.replace("-", "_")
    ours = SYNONYMS.get(f"{label}.{word}") or SYNONYMS.get(word) or SYNONYMS.get(word.lower(), "")
    for candidate in ours.split(" | "):
        if candidate.startswith(":") or first_word(candidate) in names:
            return candidate
    return None


def first_word(text: str) -> str:
    """The name with which a text begins, if it begins with one."""
    match = re.match(r"\w+", text)
    return match[0] if match else ""
