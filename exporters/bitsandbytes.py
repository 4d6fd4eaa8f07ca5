"""bitsandbytes' entry in config.json, as transformers' BitsAndBytesConfig saves it.

`runtime/library_formats.py` reads it, ours or another tool's; `runtime/kernels/four_bit.py` and `llm_int8.py` have the
layers, whose state dicts are what the weight files hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..runtime.kernels.packed import QuantScheme


def bitsandbytes_config(model: PreTrainedModel, scheme: QuantScheme, skip: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a model whose quantized layers all have this scheme, and `skip` none."""
    from transformers import BitsAndBytesConfig

    from ..runtime.kernels.four_bit import FourBitScheme
    from ..runtime.kernels.llm_int8 import LLMInt8Scheme

    options: dict[str, Any] = {"llm_int8_skip_modules": skip}
    if isinstance(scheme, LLMInt8Scheme):
        options.update(load_in_8bit=True, llm_int8_threshold=scheme.threshold)
    elif isinstance(scheme, FourBitScheme):
        options.update(
            load_in_4bit=True,
            bnb_4bit_quant_type=scheme.kind,
            bnb_4bit_use_double_quant=scheme.nested,
            bnb_4bit_compute_dtype=scheme.compute_dtype or str(model.dtype).removeprefix("torch."),
        )
    return {**BitsAndBytesConfig(**options).to_dict(), "quant_method": "bitsandbytes"}
