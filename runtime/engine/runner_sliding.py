"""What the sliding KV cache (`sliding.py`) means to a runner: each layer's mask, the pool's size, and a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...optimizer.errors import RunError, UsageError
from ..attention.layer import AttentionLayer
from .sliding import Sliding


class UnsupportedSliding(RunError):
    """This model's attention cannot have the sliding mask."""


def sliding_of(kv_sinks: int, kv_window: int | None) -> Sliding | None:
    """The runner's options as settings; None where no window is asked for. Raises UsageError for impossible ones."""
    if kv_window is None:
        if kv_sinks:
            raise UsageError("kv_sinks without kv_window: all tokens are kept anyway", "load", "Give kv_window too.")
        return None
    if kv_window < 1 or kv_sinks < 0:
        raise UsageError(
            f"kv_window={kv_window} and kv_sinks={kv_sinks}: it takes a window of 1 or more, and 0 sinks or more",
            "load",
        )
    return Sliding(kv_sinks, kv_window)


def reach(window: int, sliding: Sliding) -> tuple[int, int]:
    """(window, kept first tokens) of a layer that has `window` of its own (0: none).

    A window that is not longer than the cache's stays as the model has it, without sinks. A longer one, and full
    attention, become the cache's.
    """
    return (window, 0) if 0 < window <= sliding.window else (sliding.window, sliding.sinks)


def sliding_layers(layers: Sequence[AttentionLayer], sliding: Sliding) -> tuple[AttentionLayer, ...]:
    """The layers with the mask. Raises UnsupportedSliding for latent attention, whose gathered keys are all of them."""
    if any(layer.kind != "paged" for layer in layers):
        raise UnsupportedSliding(
            "latent attention has no sliding KV cache", "kv_window", "Leave kv_window out, or use kind: paged."
        )
    changed = []
    for layer in layers:
        window, sinks = reach(layer.window, sliding)
        changed.append(replace(layer, window=window, sink_tokens=sinks))
    return tuple(changed)


def useful_blocks(
    sliding: Sliding | None, max_model_len: int, block_size: int, max_num_seqs: int, step: int, tail_blocks: int = 0
) -> int:
    """Most blocks that `max_num_seqs` requests fill. step: tokens in the largest step, which a prompt's chunk adds.
    tail_blocks: see `BlockPool`."""
    whole = max_num_seqs * (-(-max_model_len // block_size) + tail_blocks)
    if sliding is None:
        return whole
    return min(whole, max_num_seqs * (sliding.most_blocks(block_size) + tail_blocks) + -(-step // block_size))


def sliding_note(sliding: Sliding, block_size: int, max_model_len: int, own: Sequence[int]) -> str:
    """What is kept, of which layers, and where a request still ends. own: the layers' own windows, 0 for none."""
    shorter = sum(0 < window <= sliding.window for window in own)
    kept = f"; {shorter} layers keep their own window, which is not longer" if shorter else ""
    return (
        f"sliding KV cache: the first {sliding.sinks} and the last {sliding.window} tokens, at most "
        f"{sliding.most_blocks(block_size)} blocks of {block_size} a request{kept}; positions are the true ones, so a "
        f"request ends with `length` at {max_model_len} tokens"
    )
