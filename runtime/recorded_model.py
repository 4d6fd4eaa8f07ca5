"""Opening a model by the record of an earlier load, without transformers' modeling code; and keeping such records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optimizer.errors import LlmoptError
from .load_record import LoadRecord, record_path, records_wanted
from .mapped_tensor import MappedTensor, drop_file_pages
from .open import DTYPES, CheckedFolder, OpenedModel, open_model, quiet_transformers, resolve_device
from .tensor_files import locate
from .tokenizer_files import open_tokenizer, open_tokenizer_as, tokenizer_class
from .weight_files import weight_files

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from .kernels.decoder import FusedDecoder
    from .kernels.recognize import ModelStructure


RECORD_FAULTS = (LlmoptError, OSError, ValueError, KeyError, TypeError, RuntimeError)
"""What opening by a record may raise; each means: open the model in full instead."""

KEPT = "a record of this load was kept; the next one is quicker"


class RecordedModel(OpenedModel):
    """An OpenedModel whose module is opened only if somebody asks for it.

    Its weights lie in the files until `build_decoder` packs them; the embedding is used where it lies.
    """

    def __init__(
        self, checked: CheckedFolder, record: LoadRecord, tokenizer: PreTrainedTokenizerBase, dtype_name: str
    ) -> None:
        self.folder, self.manifest, self.hashes = checked.path, checked.manifest, checked.hashes
        self.runtime, self.tokenizer, self.dtype_name = checked.runtime, tokenizer, dtype_name
        self.record, self.remote_code, self.notes = record, False, []
        self.note("opened by the record of an earlier load, without transformers' modeling code")

    @cached_property
    def _whole(self) -> OpenedModel:
        return open_model(self.folder, "cpu", self.dtype_name, verify=False)

    @property
    def module(self) -> PreTrainedModel:  # type: ignore[override]
        """The torch module with weights of its own, opened at the first access."""
        return self._whole.module

    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        return self._whole.generation_config

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def architecture(self) -> str:
        return self.record.architecture

    @property
    def context_length(self) -> int | None:
        return self.record.context_length

    @property
    def eos_token_ids(self) -> list[int]:
        return list(self.record.eos_token_ids)

    def weight_bytes(self) -> int:
        own = self._whole.weight_bytes() if "_whole" in self.__dict__ else 0
        norms = sum(tensor.nbytes for name, tensor in self.record.tensors.items() if name != "expected")
        return own + norms + self._embedding.tensor.nbytes

    @cached_property
    def _stored(self) -> Any:
        return locate(weight_files(self.folder))

    @cached_property
    def _embedding(self) -> Any:
        import torch

        dtype = getattr(torch, self.record.structure["dtype"])
        return MappedTensor(self._stored[self.record.embedding], dtype)

    def longest_request(self, wanted: int | None) -> tuple[int, str]:
        """See `engine.runner.longest_request`. Raises ValueError where more is wanted than the record knows to be
        right."""
        limit, note = self.record.max_model_len, self.record.length_note
        if wanted is not None and wanted > limit:
            raise ValueError(f"max_model_len {wanted} is more than the {limit} positions of the record")
        return (limit, note) if wanted is None else (wanted, "")

    def build_decoder(self, *, num_threads: int | None, prove: bool, release: bool, **options: Any) -> FusedDecoder:
        """Pack the weights, a layer in memory at a time, and prove the decoder against the recorded logits.

        Raises what `kernels.decoder.build_decoder` does, and KeyError, TypeError, ValueError or RunError where record
        and files do not belong together. `release` has no effect: there is no module to release.
        """
        from .kernels.decoder import DecoderOptions, FusedDecoder
        from .kernels.native import library, set_num_threads
        from .kernels.proof import check
        from .record_structure import rebuild

        library()
        if num_threads is not None:
            set_num_threads(num_threads)
        structure = rebuild(self.record, self._embedding.tensor, self._stored)
        decoder = FusedDecoder(structure, DecoderOptions(**options))
        if prove:
            decoder.proof = replace(check(decoder, self.record.tensors["expected"]), expected=None)
        self._embedding.drop_pages()
        del self.record.tensors["expected"]
        return decoder


def open_recorded(
    checked: CheckedFolder, device: str, dtype: str, engine_options: Mapping[str, Any]
) -> RecordedModel | None:
    """The folder's model by the record of an earlier load; None where there is none that fits, or the engine's
    options ask for another runner than the native one.

    Raises one of RECORD_FAULTS where record and folder do not belong together or either is damaged.
    """
    runner, attention = (engine_options.get(name, "auto") for name in ("runner", "attention"))
    if runner not in ("auto", "native") or attention != "auto":
        return None
    if not records_wanted() or dtype not in DTYPES or resolve_device(device) != "cpu":
        return None
    folder, spec = checked.path, checked.runtime
    if spec.attention.backend != "auto" or spec.draft.kind == "model":
        return None
    record = LoadRecord.read(record_path(folder, f"{dtype} {spec.dtype}", checked.hashes))
    if record is None:
        return None
    with quiet_transformers():
        tokenizer = open_tokenizer_as(folder, record.tokenizer) if record.tokenizer else open_tokenizer(folder)
    return RecordedModel(checked, record, tokenizer, dtype)


class FirstLoad:
    """A DecoderSource over a model that `open_model` has just opened: proves the decoder against the module, but packs
    it from the files as every later load will, so that the module's weights and their copies are never in memory
    together. Afterwards the module's linears are empty."""

    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened

    def longest_request(self, wanted: int | None) -> tuple[int, str]:
        """See `engine.runner.longest_request`."""
        from .engine.runner import longest_request

        return longest_request(self.opened.module, wanted)

    def build_decoder(self, *, num_threads: int | None, prove: bool, release: bool, **options: Any) -> FusedDecoder:
        """The decoder, proved whatever `prove` says: nothing else vouches for the files. Keeps a record.

        Raises what `RecordedModel.build_decoder` does, NotRecordable and OSError.
        """
        from .kernels.proof import expected_logits
        from .kernels.recognize import recognize

        opened, model = self.opened, self.opened.module.eval()
        structure = recognize(model)
        record = make_record(opened, structure, expected_logits(model, structure.vocab))
        parts = [*structure.linears, *([] if structure.head_tied else [structure.head])]
        for module in {id(part.module): part.module for part in parts}.values():
            _empty(module)
        drop_file_pages(weight_files(opened.folder))
        checked = CheckedFolder(opened.folder, opened.manifest, opened.hashes, opened.runtime)
        own = replace(record, tensors=dict(record.tensors))
        source = RecordedModel(checked, own, opened.tokenizer, opened.dtype_name)
        decoder = source.build_decoder(num_threads=num_threads, prove=True, release=release, **options)
        record.save(path_for(opened))
        return decoder


def _empty(module: nn.Module) -> None:
    from torch import nn

    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))


def path_for(opened: OpenedModel) -> Path:
    """Where the record of an opened model belongs."""
    return record_path(opened.folder, f"{opened.dtype_name} {opened.runtime.dtype}", opened.hashes)


def make_record(opened: OpenedModel, structure: ModelStructure, expected: torch.Tensor) -> LoadRecord:
    """The record of a model. expected: see `LoadRecord`. Raises NotRecordable where a later load could not build it."""
    from .engine.runner import longest_request
    from .record_structure import describe

    found = describe(opened.module, structure, locate(weight_files(opened.folder)))
    limit, note = longest_request(opened.module, None)
    return LoadRecord(
        architecture=opened.architecture,
        context_length=opened.context_length,
        max_model_len=limit,
        length_note=note,
        eos_token_ids=opened.eos_token_ids,
        tokenizer=tokenizer_class(opened.tokenizer, opened.folder),
        embedding=found.embedding,
        structure=found.structure,
        linears=found.linears,
        tensors={**found.tensors, "expected": expected},
    )


def keep_record(opened: OpenedModel, decoder: FusedDecoder) -> list[str]:
    """Keep what this load found out, for the next; returns a note on what came of it, none where none was wanted."""
    from .record_structure import NotRecordable

    proof = decoder.proof
    if proof is None or proof.expected is None:
        return []
    decoder.proof = replace(proof, expected=None)
    if not records_wanted() or opened.remote_code:
        return []
    try:
        make_record(opened, decoder.structure, proof.expected).save(path_for(opened))
    except (NotRecordable, OSError) as error:
        return [f"no record of this load was kept ({error}); the next one takes as long"]
    return [KEPT]
