"""Opening a model: an llmopt artifact or a plain Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import LlmoptError, RunError, UsageError, brief
from ..optimizer.runtime_spec import AttentionSpec, RuntimeSpec
from .artifact import read_manifest, runtime_spec, verify_files
from .chat import context_length
from .library_formats import prepare_library_layers, runs_library_format
from .memory import weight_bytes
from .tokenizer_files import open_tokenizer
from .weight_files import read_header, read_json, weight_files

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "float32", "bfloat16", "float16")
IMPLEMENTATIONS = {"flash_attn": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
"""RuntimeSpec's attention backends → transformers' `attn_implementation`."""


@dataclass(frozen=True)
class CheckedFolder:
    """A model folder that `check_folder` found sound.

    manifest: None for a plain model. hashes: SHA-256 by relative path of the files that were verified.
    """

    path: Path
    manifest: dict[str, Any] | None
    hashes: dict[str, str]
    runtime: RuntimeSpec


@dataclass
class OpenedModel:
    """A model ready to run. `notes` are dicts of `stage`, `kind` ("note" or "fallback") and `message`."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig
    runtime: RuntimeSpec
    manifest: dict[str, Any] | None
    folder: Path
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 by relative path of the files that were verified when it was opened."""
    dtype_name: str = "auto"
    """The argument `dtype`."""
    remote_code: bool = False
    """Whether code in the folder may be run."""
    as_stored: bool = False
    """Whether nobody can have changed the module's weights since they were read."""
    notes: list[dict[str, str]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def architecture(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def context_length(self) -> int | None:
        """See `chat.context_length`."""
        return context_length(self.module.config)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text: the generation config's, else the model config's, else the tokenizer's."""
        return token_ids_of_end(self.generation_config, self.module.config, self.tokenizer)

    def weight_bytes(self) -> int:
        """Bytes that the module's weights hold in memory, see `memory.weight_bytes`."""
        return weight_bytes(self.module)

    def note(self, message: str, kind: str = "note") -> None:
        self.notes.append({"stage": "load", "kind": kind, "message": message})


def token_ids_of_end(generation: GenerationConfig, config: PreTrainedConfig, tokenizer: Any) -> list[int]:
    """Tokens that end a text: the generation config's, else the model config's, else the tokenizer's."""
    for source in (generation, config, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []


def open_model(
    path: str | Path | CheckedFolder,
    device: str = "auto",
    dtype: str = "auto",
    *,
    trust_remote_code: bool = False,
    verify: bool = True,
    attention: str | None = None,
) -> OpenedModel:
    """Open an artifact (a folder with `llmopt.json`) or a plain Hugging Face folder with safetensors.

    path: the folder, or what `check_folder` said of it.
    device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1" …
    dtype: "auto" (what the RuntimeSpec, else config.json says) or float32, bfloat16, float16; packed codes stay packed.
    verify: check the SHA-256 of every file that the manifest names.
    attention: overrides the RuntimeSpec's backend: "auto", "flash_attn", "sdpa" or "eager".

    Raises UsageError for a wrong argument or a folder that holds no model, RunError for a damaged one.
    """
    checked = path if isinstance(path, CheckedFolder) else check_folder(path, verify)
    folder, spec = checked.path, checked.runtime
    if attention is not None:
        if attention not in ("auto", *IMPLEMENTATIONS):
            raise UsageError(
                f"unknown attention backend {attention!r}", what_to_do="Use auto, flash_attn, sdpa or eager."
            )
        spec = spec.model_copy(update={"attention": AttentionSpec.model_validate({"backend": attention})})
    for file in weight_files(folder):
        read_header(file)
    device = resolve_device(device)
    with quiet_transformers():
        config = open_config(folder, trust_remote_code)
        tokenizer = open_tokenizer(folder, trust_remote_code)
        module = _open_module(folder, config, resolve_dtype(dtype, spec, config), device, trust_remote_code)
        module.generation_config = open_generation_config(folder, module)
    opened = OpenedModel(
        module, tokenizer, module.generation_config, spec, checked.manifest, folder, checked.hashes, dtype,
        trust_remote_code,
    )  # fmt: skip
    apply_attention(opened)
    return opened


def check_folder(path: str | Path, verify: bool = True) -> CheckedFolder:
    """What there is to know of a folder before its model is opened. verify: as for `open_model`.

    Raises UsageError for a folder that holds no model, RunError for a damaged artifact.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.exists() else "there is no such folder"
        raise UsageError(what, where=str(path), what_to_do="Give a model folder or an artifact that llmopt wrote.")
    if not (folder / "config.json").is_file():
        raise UsageError("the folder has no config.json, so it holds no model", where=str(folder))
    manifest = read_manifest(folder)
    hashes: dict[str, str] = {}
    if manifest is not None and verify:
        verify_files(folder, manifest)
        hashes = dict(manifest["files"])
    return CheckedFolder(folder, manifest, hashes, runtime_spec(folder, manifest))


def open_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The folder's config. Raises UsageError where transformers does not know the model type, RunError on bad JSON."""
    from transformers import AutoConfig

    from .gptq_format import entry_of_twin

    raw = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        if isinstance(raw, dict) and raw.get("auto_map") and not trust_remote_code:
            raise UsageError(
                "the model needs code that its folder carries",
                where=str(folder),
                what_to_do="Read that code, then pass trust_remote_code=True if you trust it.",
            ) from error
        raise UsageError(f"config.json is not usable ({brief(error)})", where=str(folder / "config.json")) from error
    if getattr(config, "quantization_config", None) is None and (entry := entry_of_twin(folder)) is not None:
        config.quantization_config = entry
    return config


def open_generation_config(folder: Path, module: PreTrainedModel) -> GenerationConfig:
    """generation_config.json where the folder has one, else what the model's config implies."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json")
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_model_config(module.config)


def resolve_device(device: str) -> str:
    """ "auto" → "cuda" or "cpu". Raises UsageError for a device that torch does not have here."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"the device {device!r} cannot be used ({brief(error)})", what_to_do="Try cpu.") from None
    return device


def resolve_dtype(dtype: str, spec: RuntimeSpec, config: PreTrainedConfig) -> torch.dtype:
    """The activation dtype: the argument, else the RuntimeSpec's, else config.json's, else float32."""
    import torch

    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", what_to_do=f"Use one of {', '.join(DTYPES)}.")
    name = dtype if dtype != "auto" else spec.dtype
    if name != "auto":
        return getattr(torch, name)
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def apply_attention(opened: OpenedModel) -> None:
    """Select the RuntimeSpec's attention backend on the module and note what it came to.

    `auto` takes what the pass chose, and falls back with a note where this machine cannot run it. A backend named
    explicitly that cannot be used is a RunError.
    """
    spec, module = opened.runtime.attention, opened.module
    wanted = spec.backend if spec.backend != "auto" else spec.chosen
    if wanted is None:
        opened.note(f"attention: {module.config._attn_implementation} (transformers' own choice)")
        return
    try:
        if wanted == "flash_attn" and module.device.type != "cuda":
            raise ValueError(f"flash-attn needs CUDA, the model is on {module.device.type}")
        module.set_attn_implementation(IMPLEMENTATIONS.get(wanted, wanted))
    except (ValueError, ImportError, RuntimeError) as error:
        if spec.backend != "auto":
            raise RunError(
                f"the attention backend {wanted!r} cannot be used here ({brief(error)})",
                where=str(opened.folder),
                what_to_do="Choose another with attention='auto' or 'sdpa'.",
            ) from error
        opened.note(f"attention: {module.config._attn_implementation}, not {wanted} ({brief(error)})", "fallback")
        return
    opened.note(f"attention: {module.config._attn_implementation}, as the RuntimeSpec asks ({spec.backend})")


def _open_module(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: str, trust_remote_code: bool
) -> PreTrainedModel:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    if quantization and quantization.get("quant_method") in ("compressed-tensors", "gptq"):
        from .packed_format import runs_packed
        from .packed_load import load_packed

        if runs_packed(quantization):
            return load_packed(
                folder, config, quantization, dtype=dtype, device=device, trust_remote_code=trust_remote_code
            )
    if quantization and runs_library_format(quantization):
        from .packed_load import load_packed

        module = load_packed(
            folder, config, quantization, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
        prepare_library_layers(module)
        return module
    return _from_pretrained(folder, dtype, device, trust_remote_code)


def _from_pretrained(folder: Path, dtype: torch.dtype, device: str, trust_remote_code: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from .packed_load import raise_on_keys

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **({} if device == "cpu" else {"device_map": {"": device}}),
        )
    except LlmoptError:
        raise
    except Exception as error:  # transformers, safetensors and torch raise many kinds here
        raise RunError(f"the model cannot be opened ({brief(error)})", where=str(folder)) from error
    module, loading = loaded
    for name, stored, expected in sorted(loading.get("mismatched_keys") or [], key=lambda entry: entry[0]):
        shapes = f"shape {tuple(stored)}, the model's config makes it {tuple(expected)}"
        raise RunError(f"{name} has {shapes}", str(folder), "config.json and the weights do not belong together.")
    raise_on_keys(folder, loading.get("missing_keys") or [], loading.get("unexpected_keys") or [])
    return module.eval()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it transformers shows no progress bars and logs errors only; its settings are put back after."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
