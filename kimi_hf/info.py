"""`kimi-hf info`: what a model costs, from its configuration, and what a checkpoint folder really holds."""

import argparse
from pathlib import Path

from .configuration import PRESETS, Census, KimiK3Config, KimiLinearConfig, LadderConfig, census, preset
from .configuration.census import GPT2_SMALL
from .errors import ConfigError

_ROUNDED_GPT2 = 124e6


def describe(config) -> list[str]:
    """Printable lines: parameters per part, total and activated, bytes as stored, cache and state bytes."""
    counted = census(config)
    text = config.get_text_config()
    lines = [f"{type(config).__name__}: {text.num_hidden_layers} layers, hidden size {text.hidden_size}", ""]
    lines.append(f"{'part':<26}{'each':>20}{'count':>9}{'total':>22}{'stored bytes':>22}")
    for part in counted.parts:
        stored = part.stored_bytes * part.count
        lines.append(f"{part.name:<26}{part.parameters:>20,}{part.count:>9,}{part.total:>22,}{stored:>22,}")
    if counted.vision_total:
        lines.append(_total("text", counted.text_total))
    lines += [_total("total", counted.total, counted.stored_bytes), ""]
    lines += [
        f"activated per token        {_short(counted.activated)} of {_short(counted.text_total)} in the text model "
        "(lm_head counted, embedding table and vision not)",
        *_against_gpt2(counted),
        f"cache per token            {counted.cache_bytes_per_token:,} bytes in bf16 "
        f"(keys and values per head would be {counted.expanded_cache_bytes_per_token:,})",
        f"recurrent state            {counted.state_bytes:,} bytes a sequence in fp32, whatever its length",
        f"convolution windows        {counted.conv_state_bytes:,} bytes a sequence in bf16",
    ]
    return lines


def _total(name: str, parameters: int, stored: int | None = None) -> str:
    tail = "" if stored is None else f"{stored:>22,}"
    return f"{name:<26}{'':>20}{'':>9}{parameters:>22,}{tail}"


def _short(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"


def _against_gpt2(counted: Census) -> list[str]:
    """GPT-2 small has 124,439,808 parameters; the article's figures take it as 124 M and the total as 2.8 T."""
    if counted.total < GPT2_SMALL:
        return []
    total, activated = counted.total / GPT2_SMALL, counted.activated / GPT2_SMALL
    lines = [f"against GPT-2 small        {total:,.1f} times in all, {activated:,.1f} times activated"]
    if counted.total > 1e12:
        in_all = int(round(counted.total / 1e12, 1) * 1e12 / _ROUNDED_GPT2)
        active = int(round(counted.activated / 1e9, 1) * 1e9 / _ROUNDED_GPT2)
        lines.append(
            f"                           (in rounded figures, {counted.total / 1e12:.1f} T over 124 M: {in_all:,} times; "
            f"{counted.activated / 1e9:.1f} B over 124 M: {active:,} times)"
        )
    return lines


def read_config(source: str):
    """The configuration a user names: a preset, a folder with config.json, or the file itself.

    Raises:
        ConfigError: neither exists; the message lists the presets.
    """
    if source in PRESETS:
        return preset(source)
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"{source!r} is neither a folder nor a preset; presets are {', '.join(PRESETS)}")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"{source} has no config.json; name a checkpoint folder or a preset")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="checkpoint folder, config.json, or preset name")


def run(args: argparse.Namespace) -> int:
    config, path = read_config(args.source), Path(args.source)
    counted = isinstance(config, (KimiK3Config, KimiLinearConfig, LadderConfig))  # Hugging Face's GPT-2 has no census
    lines = describe(config) if counted else [f"{type(config).__name__}: parameters are counted from the files alone"]
    if args.source not in PRESETS and path.is_dir() and any(path.glob("*.safetensors*")):
        from .conversion.info import describe_folder

        lines += ["", f"files in {path}:", *describe_folder(path)]
    print("\n".join(lines))
    return 0
