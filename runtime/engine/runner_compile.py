"""The compiled runner: the whole model as one graph (`torch.compile(fullgraph=True)`), attention as one operator in it.

Two graphs serve every plan: one token (a lone decode), and any other number of tokens. Everything but the number of
tokens enters only our operator and the index of the wanted logits, and is traced as an unknown size. After the warm-up
dynamo's guards are skipped but for those that tell the two graphs apart: they would cost about a millisecond a step on
a model of 30 layers, and what they guard (the module, the kinds of the arguments) is held fixed by the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...optimizer.errors import RunError
from ..attention.pool import KVPool
from .plan import Row, StepPlan
from .runner import EagerRunner

if TYPE_CHECKING:
    import torch

    from .runner_inputs import StepTensors


def one_graph_fault(runner: EagerRunner) -> str:
    """Why a runner's model cannot be one graph; empty where it can."""
    if not runner.probe.passes_keywords:
        return "its layers drop keyword arguments on the way to the attention function"
    if runner.probe.needs_cache:
        return "it needs a step cache (latent attention, or positions taken from the cache's length)"
    return ""


def compile_model(model: Any, compiler: str) -> Callable[..., Any]:
    """The model as one graph. compiler: a dynamo backend, `inductor` to generate code."""
    import torch

    return torch.compile(model, fullgraph=True, backend=compiler)


def mark_sizes(step: StepTensors, pool: KVPool) -> None:
    """Tell dynamo which sizes change from step to step, and that the pool's never do."""
    import torch._dynamo as dynamo

    tokens = step.token_ids.shape[1]
    if tokens > 1:
        for tensor in (step.token_ids, step.positions):
            dynamo.mark_dynamic(tensor, 1)
        dynamo.decorators.mark_unbacked(step.batch.slots, 0)
    for tensor in (step.batch.cu_seqlens_q, step.batch.seq_lens, step.logit_rows):
        dynamo.decorators.mark_unbacked(tensor, 0)
    for dimension in (0, 1):
        dynamo.decorators.mark_unbacked(step.batch.block_tables, dimension)
    for tensor in pool.tensors:
        dynamo.mark_static(tensor)


class CompileRunner(EagerRunner):
    """`EagerRunner` over a compiled model. Takes its options, and:

    compiler: dynamo backend.
    skip_guards: after the warm-up, evaluate only the guards that tell the graphs apart. The model must then not be
        changed (moved, quantized, adapters loaded) while the runner holds it.

    Compiles at load, which takes from seconds to minutes. Raises RunError for a model that is not one graph.
    """

    def __init__(self, model: Any, *, compiler: str = "inductor", skip_guards: bool = True, **options: Any) -> None:
        self._skip_guards = self._compiled = False
        super().__init__(model, **options)
        try:
            fault = one_graph_fault(self)
            if fault:
                raise RunError(
                    f"{type(model).__name__} cannot be compiled as one graph: {fault}", "", "Use the eager runner"
                )
            self._run, self._compiled = compile_model(model, compiler), True
            self._compile_graphs()
        except BaseException:
            self.close()
            raise
        self._skip_guards = skip_guards
        self.notes.append(f"compiled by {compiler}, one graph for one token and one for more")

    def _compile_graphs(self) -> None:
        """Trace both graphs over the first blocks of the pool."""
        table = tuple(range(1 + self.tail_blocks))
        one = Row(-1, 0, (0,), table, 1)
        many = Row(-2, 0, (0,) * min(3, self.block_size, self.max_model_len), table, 1)
        for plan in (StepPlan((one,)), StepPlan((many, one)), StepPlan((many,))):
            try:
                self.execute(plan)
            except RuntimeError as error:
                raise RunError(
                    f"{type(self.model).__name__} cannot be compiled as one graph: {str(error).splitlines()[0]}",
                    "",
                    "Use the eager runner",
                ) from error

    def _forward(self, step: StepTensors, pool: KVPool) -> torch.Tensor:
        import torch
        from torch.fx.experimental import _config as shapes

        if not self._compiled:
            return super()._forward(step, pool)
        mark_sizes(step, pool)
        with ExitStack() as stack:
            if self._skip_guards:
                stack.enter_context(torch.compiler.set_stance(skip_guard_eval_unsafe=True))
            else:  # equal sizes are coincidences, not rules
                # `patch` is put into the module as torch is imported, where no annotation sees it
                stack.enter_context(shapes.patch(use_duck_shape=False))  # type: ignore[attr-defined]
            return super()._forward(step, pool)
