"""The residual stream of a decoder: which weights read it through which norm, which write it, which carry values.

Parts are known by the names that transformers gives them; whatever is not known is an obstacle with its name, and every
parameter of the model must have a part. Nothing of a model's weights is needed: the modules may be on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ...optimizer.errors import RunError
from ...runtime.decoder_blocks import find_blocks
from .norms import NormForm, norm_form

READERS = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj",
    "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "gate", "router", "shared_expert_gate",
}  # fmt: skip
WRITERS = {"o_proj", "dense", "out_proj", "down_proj", "fc2", "c_proj", "dense_4h_to_h"}
INNER = {
    "q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj",
    "sinks", "act_fn", "act", "activation_fn", "rotary_emb", "attention_dropout", "dropout", "resid_dropout",
}  # fmt: skip
CONTAINERS = {"experts", "shared_expert", "shared_experts", "shared_mlp"}
ATTENTION = {"self_attn", "attention", "self_attention"}
FEEDFORWARD = {"mlp", "block_sparse_moe", "feed_forward"}
BEFORE_ATTENTION = {"input_layernorm", "attention_layernorm"}
BEFORE_FEEDFORWARD = {"post_attention_layernorm", "feedforward_layernorm"}
AFTER = {
    "post_feedforward_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm", "post_attention_layernorm",
    "post_attn_layernorm",
}  # fmt: skip


@dataclass
class Reads:
    """A norm of the stream and the weights `[…, out, hidden]` that read its output, by parameter name."""

    norm: str
    form: NormForm
    weights: list[str]


@dataclass
class Values:
    """One attention's path of values: `value` rows `[first, first + kv_heads * head_dim)` and `output` columns."""

    value: str
    first: int
    kv_heads: int
    output: str
    heads: int
    head_dim: int


@dataclass
class Stream:
    """All that a rotation or a fold has to touch. Names are parameter names; the last of `reads` is the final norm's.

    obstacles: why the stream cannot be rotated; fold_obstacles: why norms cannot be folded; value_obstacles: why values
    cannot be. Sentences without a subject, each naming a module.
    """

    embeddings: list[str] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    values: list[Values] = field(default_factory=list)
    head: str = ""
    tied: bool = False
    hidden: int = 0
    inner: set[str] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)
    fold_obstacles: list[str] = field(default_factory=list)
    value_obstacles: list[str] = field(default_factory=list)

    @property
    def final(self) -> Reads:
        return self.reads[-1]

    @property
    def centered(self) -> bool:
        """Whether any norm subtracts the mean."""
        return any(reads.form.centered for reads in self.reads)


def find_stream(model: nn.Module) -> Stream:
    """Map a causal language model; what stands in the way of a use is listed, not raised."""
    stream = Stream()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    try:
        blocks_name, blocks = find_blocks(model)
    except RunError as error:
        _obstruct(stream, str(error))
        return stream
    if head is None or embedding is None or embedding.weight.shape != head.weight.shape:
        _obstruct(stream, "the model has no output head of the embeddings' shape")
        return stream
    stream.hidden = embedding.weight.shape[1]
    stream.embeddings = [f"{names[id(embedding)]}.weight"]
    stream.head, stream.tied = f"{names[id(head)]}.weight", head.weight is embedding.weight
    for index, block in enumerate(blocks):
        _map_block(stream, block, f"{blocks_name}.{index}")
    _map_final(stream, model, blocks_name)
    _account(stream, model)
    _find_clipping(stream, model)
    return stream


def _map_block(stream: Stream, block: nn.Module, name: str) -> None:
    children = {n: m for n, m in block.named_children() if _has_parameters(m) or _is_norm(n)}
    attention = next((n for n in children if n in ATTENTION), None)
    feedforward = next((n for n in children if n in FEEDFORWARD), None)
    if attention is None or feedforward is None:
        _obstruct(stream, f"{name} has no attention and feed-forward part of a known name ({', '.join(children)})")
        return
    before = next((n for n in children if n in BEFORE_ATTENTION), None)
    second = next((n for n in children if n in BEFORE_FEEDFORWARD), None)
    known = {attention, feedforward, before, second}
    after = sorted(n for n in children if n in AFTER and (n not in known or before is None))
    after += [second] if "pre_feedforward_layernorm" in children and second else []
    if after:
        stream.obstacles.append(
            f"{name}.{after[0]} normalizes what is added to the residual stream, and its weights, one a channel, do "
            "not commute with a rotation"
        )
        stream.fold_obstacles.append(f"{name} normalizes outputs ({after[0]}), which no linear layer follows")
        _map_part(stream, children[attention], f"{name}.{attention}", [], attention=True)
        stream.inner |= {f"{name}.{n}." for n in children}
        return
    for other in sorted(children.keys() - known):
        _obstruct(stream, f"{name} has an unknown part {other!r} ({type(children[other]).__name__})", values=False)
    if before is None:
        _obstruct(stream, f"{name} has no norm before its attention")
        return
    readers: list[str] = []
    _map_part(stream, children[attention], f"{name}.{attention}", readers, attention=True)
    if second is not None:
        _add_reads(stream, children[before], f"{name}.{before}", readers)
        readers = []
        before = second
    _map_part(stream, children[feedforward], f"{name}.{feedforward}", readers)
    _add_reads(stream, children[before], f"{name}.{before}", readers)


def _map_part(stream: Stream, part: nn.Module, name: str, readers: list[str], attention: bool = False) -> None:
    """Sort the parameters of an attention or feed-forward part into readers, writers and inner ones."""
    for own, parameter in part.named_parameters(recurse=False):
        if own in INNER:
            stream.inner.add(f"{name}.{own}")
        elif own in READERS | WRITERS and parameter.ndim == 3:
            if getattr(part, "is_transposed", False):
                _obstruct(stream, f"{name}.{own} keeps its experts transposed", values=False)
            elif own in READERS:
                _add_reader(stream, f"{name}.{own}", parameter.shape[-1], readers)
            else:
                _add_writer(stream, f"{name}.{own}", parameter.shape[-2])
        else:
            _obstruct(stream, f"{name} has an unknown parameter {own!r}", values=False)
    for own, child in part.named_children():
        path = f"{name}.{own}"
        if not _has_parameters(child):
            continue
        weight = getattr(child, "weight", None)
        if own in INNER:
            stream.inner.add(f"{path}.")
        elif own in CONTAINERS or own.isdigit():
            _map_part(stream, child, path, readers)
        elif own in READERS and weight is not None and not isinstance(weight, nn.Module):
            _add_reader(stream, f"{path}.weight", weight.shape[-1], readers)
        elif own in WRITERS and weight is not None:
            _add_writer(stream, f"{path}.weight", weight.shape[-2])
        else:
            _obstruct(stream, f"{path} ({type(child).__name__}) is unknown", values=False)
    if attention:
        _map_values(stream, part, name)


def _add_reader(stream: Stream, name: str, inputs: int, readers: list[str]) -> None:
    readers.append(name)
    if inputs != stream.hidden:
        _obstruct(stream, f"{name} has {inputs} inputs, the residual stream {stream.hidden} channels", values=False)


def _add_writer(stream: Stream, name: str, outputs: int) -> None:
    stream.writes.append(name)
    if outputs != stream.hidden:
        _obstruct(stream, f"{name} has {outputs} outputs, the residual stream {stream.hidden} channels", values=False)


def _add_reads(stream: Stream, norm: nn.Module, name: str, weights: list[str]) -> None:
    form = norm_form(norm)
    if form is None:
        _obstruct(stream, f"{name} ({type(norm).__name__}) is no RMSNorm or LayerNorm of a known form", values=False)
        stream.inner.add(f"{name}.")
        return
    stream.reads.append(Reads(name, form, weights))


def _map_values(stream: Stream, attention: nn.Module, name: str) -> None:
    """The path of values through an attention whose heads lie one after the other."""
    children = dict(attention.named_children())
    value, fused = children.get("v_proj"), children.get("qkv_proj")
    output = next((n for n in ("o_proj", "dense", "out_proj") if n in children), None)
    head_dim = getattr(attention, "head_dim", None)
    odd = [n for n in children if "v_norm" in n or "value" in n or n == "gate_proj"]
    if odd:
        stream.value_obstacles.append(f"{name}.{odd[0]} stands between values and output")
    elif output is None or not isinstance(head_dim, int) or (value is None and fused is None):
        stream.value_obstacles.append(f"{name} has no v_proj or qkv_proj with an output projection")
    else:
        heads = children[output].get_parameter("weight").shape[-1] // head_dim
        source, first = "v_proj" if value is not None else "qkv_proj", 0
        rows = children[source].get_parameter("weight").shape[0]
        query = children.get("q_proj")
        if value is None:
            rows, first = (rows - heads * head_dim) // 2, rows - (rows - heads * head_dim) // 2
        elif query is not None and query.get_parameter("weight").shape[0] != heads * head_dim:
            stream.value_obstacles.append(f"{name}.q_proj holds more than queries: the output may be gated")
            return
        kv_heads = rows // head_dim
        if not kv_heads or rows % head_dim or heads % kv_heads:
            stream.value_obstacles.append(f"{name} has {rows} value rows for {heads} heads of {head_dim}")
            return
        value_name = f"{name}.{source}.weight"
        stream.values.append(Values(value_name, first, kv_heads, f"{name}.{output}.weight", heads, head_dim))


def _map_final(stream: Stream, model: nn.Module, blocks_name: str) -> None:
    parent_name = blocks_name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    norms = [(n, m) for n, m in parent.named_children() if _is_norm(n)]
    if len(norms) != 1:
        _obstruct(stream, f"{parent_name} has {len(norms)} norms after its blocks, not one", values=False)
        return
    name, norm = norms[0]
    _add_reads(stream, norm, f"{parent_name}.{name}" if parent_name else name, [stream.head])


def _account(stream: Stream, model: nn.Module) -> None:
    """List parameters that have no part: an unknown one could read or write the stream."""
    known = {*stream.embeddings, stream.head, *stream.writes}
    for reads in stream.reads:
        known.update(reads.weights)
        known.update(f"{reads.norm}.{kind}" for kind in ("weight", "bias"))
    known |= {f"{name.removesuffix('.weight')}.bias" for name in known if name.endswith(".weight")}
    prefixes = tuple(name for name in stream.inner if name.endswith("."))
    for name, _ in model.named_parameters():
        if name not in known and name not in stream.inner and not name.startswith(prefixes):
            _obstruct(stream, f"{name} is a parameter whose part is not known", values=False)


def _find_clipping(stream: Stream, model: nn.Module) -> None:
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    if getattr(config, "clip_qkv", None) is not None:
        stream.value_obstacles.append("the model clips queries, keys and values (clip_qkv)")


def _obstruct(stream: Stream, reason: str, values: bool = True) -> None:
    stream.obstacles.append(reason)
    stream.fold_obstacles.append(reason)
    if values:
        stream.value_obstacles.append(reason)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_norm(name: str) -> bool:
    return "norm" in name.lower() or name in ("ln_f", "ln_1", "ln_2")
