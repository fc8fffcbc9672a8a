"""GPT-2 checkpoints: Hugging Face's layout, nanoGPT's `ckpt.pt` and the ladder's, into each other.

Both hold the same numbers under nearly the same names. Hugging Face stores the four projections of a layer as
(in, out) (its `Conv1D`), nanoGPT as (out, in); nanoGPT may leave out all biases, prefixes names of a compiled model,
and its GELU is the exact one where GPT-2's is the tanh form.

Source: transformers GPT2LMHeadModel, nanoGPT model.py (names and shapes only).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kimi_hf.checkpoint.geometry import load_config
from kimi_hf.checkpoint.layout import TensorSpec
from kimi_hf.checkpoint.shards import DTYPE_NAMES, open_checkpoint
from kimi_hf.conversion.configs import side_files, to_json
from kimi_hf.conversion.gpt2_ladder import gpt2_to_ladder, ladder_names, ladder_to_gpt2
from kimi_hf.conversion.recipes import InMemory
from kimi_hf.conversion.writer import PlannedShard, write_folder
from kimi_hf.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

TARGETS = ("gpt2", "nanogpt", "ladder")
# Per layer: the projections that the two layouts store transposed, and the norms that they store alike.
TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
NORMS = ("ln_1", "ln_2")
_WRAPPERS = ("_orig_mod.", "module.")
_MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that older versions saved as buffers
_NANO_ARGS = {"n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions"}

# What a ladder config.json may leave out, as its class fills it in.
_LADDER_DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
}

State = dict[str, torch.Tensor]


def read_nanogpt(path: str | Path) -> tuple[State, dict[str, Any]]:
    """State dict (plain names, no buffers) and `model_args` of a nanoGPT `ckpt.pt`.

    The prefixes of compiled and distributed models are stripped. Nothing but tensors and plain values is unpickled.

    Raises: CheckpointError if the file is no such checkpoint, or its tensors contradict `model_args`.
    """
    path = Path(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state, args = dict(content["model"]), dict(content["model_args"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except Exception as error:  # torch.load raises many types for a damaged or foreign file
        raise CheckpointError(f"{path} is not a nanoGPT checkpoint with 'model' and 'model_args' ({error})") from error
    missing = [name for name in (*_NANO_ARGS, "vocab_size") if not isinstance(args.get(name), int)]
    if missing:
        raise CheckpointError(f"{path}: model_args lacks {', '.join(missing)}; expected nanoGPT's GPTConfig fields")
    state = {_plain(name): tensor for name, tensor in state.items() if not name.endswith(_MASKS)}
    head, embedding = state.pop("lm_head.weight", None), state.get("transformer.wte.weight")
    if head is not None and (embedding is None or not torch.equal(head, embedding)):
        raise CheckpointError(f"{path}: lm_head.weight differs from transformer.wte.weight; GPT-2 ties them")
    _check_names(path, state, args["n_layer"], bool(args.get("bias", True)))
    return state, args


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _names(layers: int, bias: bool) -> list[str]:
    """Every tensor of a GPT-2 (the tied head left out), in `transformer.` names."""
    endings = ("weight", "bias") if bias else ("weight",)
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    for layer in range(layers):
        for module in (*NORMS, *TRANSPOSED):
            names += [f"transformer.h.{layer}.{module}.{ending}" for ending in endings]
    return names + [f"transformer.ln_f.{ending}" for ending in endings]


def _check_names(path: Path, state: State, layers: int, bias: bool) -> None:
    expected = set(_names(layers, bias))
    missing, extra = sorted(expected - state.keys()), sorted(state.keys() - expected)
    if missing or extra:
        told = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which no GPT-2 has"
        raise CheckpointError(
            f"{path} {told} ({len(missing)} missing, {len(extra)} unknown); expected {layers} layers with "
            f"{'' if bias else 'no '}biases"
        )


def _is_transposed(name: str) -> bool:
    return name.endswith(tuple(f"{module}.weight" for module in TRANSPOSED))


def nanogpt_to_gpt2(state: State, args: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """HF GPT-2 tensors and config of a nanoGPT state dict.

    Absent biases become zeros, which changes no value. The config remembers `nanogpt_bias`, for the way back.

    Args:
        state, args: as `read_nanogpt` gives them.
    Returns: state dict with `transformer.` names, (in, out) projections and no `lm_head.weight` (it is tied); config.
    """
    bias, width = bool(args.get("bias", True)), args["n_embd"]
    result: State = {}
    for name in _names(args["n_layer"], True):
        if name not in state:
            like = state[name.removesuffix("bias") + "weight"]
            result[name] = torch.zeros(like.shape[0], dtype=like.dtype)
        else:
            result[name] = state[name].t().contiguous() if _is_transposed(name) else state[name]
    dropout = float(args.get("dropout", 0.0))
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": args["vocab_size"],
        **{ours: args[theirs] for theirs, ours in _NANO_ARGS.items()},
        "n_inner": 4 * width,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "tie_word_embeddings": True,
        "nanogpt_bias": bias,
    }
    return result, config


def read_gpt2(folder: str | Path) -> tuple[State, dict[str, Any]]:
    """State dict (`transformer.` names, no buffers, no tied head) and config of a Hugging Face GPT-2 folder.

    Raises: CheckpointError if it is no GPT-2, or tensors are missing or unknown.
    """
    folder = Path(folder)
    config = load_config(folder)
    if config.get("model_type") != "gpt2":
        raise CheckpointError(f"{folder}: model_type is {config.get('model_type')!r}, expected 'gpt2'")
    with open_checkpoint(folder) as checkpoint:
        state = {
            name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": checkpoint.read(name)
            for name in checkpoint.entries
            if not name.endswith(_MASKS)
        }
    head = state.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, state.get("transformer.wte.weight", head)):
        raise CheckpointError(f"{folder}: lm_head.weight differs from wte.weight; only tied GPT-2 models are read")
    _check_names(folder, state, config["n_layer"], True)
    return state, config


def gpt2_to_nanogpt(state: State, config: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """nanoGPT state dict and `model_args` of a HF GPT-2; biases are left out if they were on the way here.

    Raises: ConfigError for a GPT-2 that nanoGPT cannot express (inner width, norm epsilon, attention scaling).
    """
    fixed = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{name} is {config[name]}; nanoGPT only knows {value}")
    width = config["n_embd"]
    if config.get("n_inner") not in (None, 4 * width):
        raise ConfigError(f"n_inner is {config['n_inner']}; nanoGPT only knows 4 * n_embd = {4 * width}")
    if config.get("activation_function", "gelu_new") != "gelu":
        logger.warning(
            "activation_function is %s; nanoGPT computes the exact GELU, so outputs will differ slightly",
            config.get("activation_function", "gelu_new"),
        )
    bias = bool(config.get("nanogpt_bias", True))
    if not bias and any(bool(tensor.any()) for name, tensor in state.items() if name.endswith(".bias")):
        bias = True  # trained since
    result = {
        name: state[name].t().contiguous() if _is_transposed(name) else state[name]
        for name in _names(config["n_layer"], bias)
    }
    result["lm_head.weight"] = result["transformer.wte.weight"]
    args = {theirs: config[ours] for theirs, ours in _NANO_ARGS.items()}
    args.update(vocab_size=config["vocab_size"], dropout=config.get("resid_pdrop", 0.0), bias=bias)
    return result, args


def state_recipes(state: State) -> list[InMemory]:
    """Recipes that write a state dict."""
    return [InMemory(TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)), t) for name, t in state.items()]


def write_nanogpt(out: Path, state: State, args: Mapping[str, Any]) -> Path:
    """`out/ckpt.pt` as nanoGPT's `--init_from=resume` reads its model from (no optimizer state)."""
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} exists; choose another folder or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        part = out / "ckpt.pt.part"
        torch.save({"model": state, "model_args": dict(args), "iter_num": 0, "best_val_loss": 1e9}, part)
        part.rename(out / "ckpt.pt")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{out / 'ckpt.pt'} cannot be written ({error}); free space or choose another") from error
    return out


def read_ladder(folder: str | Path) -> tuple[State, dict[str, Any]]:
    """State dict (no tied head) and config of a ladder folder of the GPT-2 rung.

    Raises: CheckpointError if tensors are missing or unknown.
    """
    folder = Path(folder)
    config = load_config(folder)
    with open_checkpoint(folder) as checkpoint:
        state = {name: checkpoint.read(name) for name in checkpoint.entries if name != "lm_head.weight"}
    layers, bias = config.get("num_hidden_layers", 12), config.get("bias") is not False
    missing, extra = ladder_names(layers, bias) - state.keys(), state.keys() - ladder_names(layers, bias)
    if missing or extra:
        first = f"lacks {min(missing)}" if missing else f"holds {min(extra)}, which the GPT-2 rung does not have"
        raise CheckpointError(f"{folder} {first}; expected the GPT-2 rung with {layers} layers")
    return state, {**_LADDER_DEFAULTS, **config}


def read_any(source: str | Path) -> tuple[State, dict[str, Any]]:
    """A GPT-2 in any of the three layouts, as Hugging Face tensors and config.

    Raises: CheckpointError for anything else.
    """
    source = Path(source)
    if source.suffix == ".pt" or (source / "ckpt.pt").exists():
        return nanogpt_to_gpt2(*read_nanogpt(source / "ckpt.pt" if source.is_dir() else source))
    if load_config(source).get("model_type") == "kimi_ladder":
        return ladder_to_gpt2(*read_ladder(source))
    return read_gpt2(source)


def is_gpt2(path: Path) -> bool:
    """Whether `read_any` is the right reader."""
    if path.suffix == ".pt" or (path / "ckpt.pt").exists():
        return True
    return load_config(path).get("model_type") in ("gpt2", "kimi_ladder")


def convert(source: str | Path, out: str | Path, to: str, vocab_size: int | None = None) -> Path:
    """A GPT-2 in one layout (HF folder, nanoGPT's `ckpt.pt`, ladder folder) to another.

    Args:
        to: "gpt2" (HF folder), "nanogpt" (`out/ckpt.pt`) or "ladder".
        vocab_size: keep this many embedding rows; None keeps all.
    Raises: CheckpointError, ConfigError; see the functions above.
    """
    source, out = Path(source), Path(out)
    state, config = read_any(source)
    if vocab_size is not None:
        rows = state["transformer.wte.weight"]
        if not 0 < vocab_size <= rows.shape[0]:
            raise ConfigError(f"vocab_size={vocab_size}: there are {rows.shape[0]} embedding rows; choose no more")
        state["transformer.wte.weight"] = rows[:vocab_size].contiguous()
        config = {**config, "vocab_size": vocab_size}
    config.setdefault("dtype", str(state["transformer.wte.weight"].dtype).removeprefix("torch."))
    if to == "nanogpt":
        return write_nanogpt(out, *gpt2_to_nanogpt(state, config))
    if to == "ladder":
        state, config = gpt2_to_ladder(state, config)
    folder = source if source.is_dir() else source.parent
    files: dict[str, bytes | Path] = dict(side_files(folder)) if (folder / "config.json").exists() else {}
    files["config.json"] = to_json(config)
    sources = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    shards = [PlannedShard("model.safetensors", state_recipes(state))]
    return write_folder(out, shards, files, sources=sources, label=f"convert to {to}")
