"""The CUDA-graph runner: steps of plain decoding are replayed, everything else runs as in the eager runner.

One graph a bucket of batch sizes, captured largest first into one memory pool, so that smaller graphs reuse the
largest's memory. A step of fewer rows is filled up with rows that read one token and write into the pool's scratch
block. Inputs and logits live in buffers that never move.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..attention.layer import Batch
from ..attention.op import active_batch
from .plan import StepPlan
from .runner import EagerRunner
from .runner_compile import compile_model, mark_sizes, one_graph_fault
from .runner_inputs import StepTensors

if TYPE_CHECKING:
    import torch

CAPTURABLE = {"varlen", "flash_attn", "triton"}
"""Backends that read no lengths back to the host."""
WARM_UPS = 2

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function once and returns what replays it."""


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, then every 16 up to 256, then every 64; the largest itself is one."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, largest + 1, 64)}
    return sorted({s for s in sizes if s < largest} | {largest})


class GraphPool:
    """Captures functions into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        import torch

        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Warm up on a side stream (lazy initialization must not be captured), capture, and return the replay."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay


class CudaGraphRunner(EagerRunner):
    """`EagerRunner` whose decode steps are captured. Takes its options, and:

    max_graph_seqs: most rows of a captured step; None is `max_num_seqs`.
    compiler: also compile the captured forward (`inductor`); None captures the eager one.
    capture: how a step is captured; None is CUDA graphs. Another one lets the structure run without a GPU.

    Where the attention backend reads lengths back to the host nothing is captured, and a note says so.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_num_seqs: int = 256,
        max_graph_seqs: int | None = None,
        compiler: str | None = None,
        capture: Capture | None = None,
        **options: Any,
    ) -> None:
        self._graphs: dict[int, tuple[StepTensors, Callable[[], None]]] = {}
        self._sizes: list[int] = []
        super().__init__(model, max_num_seqs=max_num_seqs, **options)
        try:
            if capture is None and (self.device.type != "cuda" or self.attention.name not in CAPTURABLE):
                self.notes.append(f"no CUDA graphs: {self.attention.name} attention on {self.device.type} runs eagerly")
                return
            self._capture(capture or GraphPool(), max_graph_seqs or max_num_seqs, compiler)
        except BaseException:
            self.close()
            raise

    def _capture(self, capture: Capture, largest: int, compiler: str | None) -> None:
        import torch

        if compiler is not None:
            fault = one_graph_fault(self)
            if fault:
                self.notes.append(f"captured without compiling: {fault}")
                compiler = None
        run = self.model if compiler is None else compile_model(self.model, compiler)
        sizes = bucket_sizes(largest)
        width = -(-self.max_model_len // self.block_size) + self.tail_blocks
        with torch.inference_mode():
            whole = self._buffers(largest, width)
            self._logits = torch.empty(largest, self.vocab_size, device=self.device)
            steps = {size: self._view(whole, size) for size in sizes}
        for size in reversed(sizes):
            step = steps[size]

            def forward(step: StepTensors = step, size: int = size) -> None:
                step.batch.memo.clear()
                with torch.inference_mode(), active_batch(step.batch, self.pool.tensors):
                    if compiler is not None:
                        mark_sizes(step, self.pool)
                    self._run = run
                    try:
                        self._logits[:size].copy_(self._forward(step, self.pool))
                    finally:
                        self._run = self.model

            self._graphs[size] = (step, capture(forward))
        self._sizes = sizes
        self.notes.append(f"CUDA graphs for {len(sizes)} batch sizes up to {largest}")

    def _buffers(self, rows: int, width: int) -> StepTensors:
        """Inputs of `rows` filler rows: token 0 at position 0, in the scratch block."""
        import torch

        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        scratch = self.num_blocks
        return StepTensors(
            token_ids=full((1, rows), 0, torch.int64),
            positions=full((1, rows), 0, torch.int64),
            logit_rows=torch.arange(rows, device=self.device),
            batch=Batch(
                slots=full((rows,), scratch * self.block_size, torch.int64),
                cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=self.device),
                seq_lens=full((rows,), 1, torch.int32),
                block_tables=full((rows, width), scratch, torch.int32),
                max_q=1,
                max_k=width * self.block_size,
            ),
        )

    @staticmethod
    def _view(whole: StepTensors, size: int) -> StepTensors:
        batch = whole.batch
        return StepTensors(
            token_ids=whole.token_ids[:, :size],
            positions=whole.positions[:, :size],
            logit_rows=whole.logit_rows[:size],
            batch=Batch(
                slots=batch.slots[:size],
                cu_seqlens_q=batch.cu_seqlens_q[: size + 1],
                seq_lens=batch.seq_lens[:size],
                block_tables=batch.block_tables[:size],
                max_q=1,
                max_k=batch.max_k,
            ),
        )

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `ModelRunner.execute`. Logits of a replayed step are a view of a buffer that the next one overwrites."""
        rows = plan.rows
        if not rows or not self._sizes or len(rows) > self._sizes[-1]:
            return super().execute(plan)
        if any(len(row.token_ids) != 1 or row.num_logits != 1 for row in rows):
            return super().execute(plan)
        return self._replay(plan)

    def _replay(self, plan: StepPlan) -> torch.Tensor:
        import torch

        from .runner_inputs import to_device

        count = len(plan.rows)
        arrays = self._builder.arrays(plan)
        size = self._sizes[bisect_left(self._sizes, count)]
        step, replay = self._graphs[size]
        scratch = self.num_blocks
        with torch.inference_mode():
            new = to_device(arrays, self.device)
            width = new.batch.block_tables.shape[1]
            step.token_ids[:, :count].copy_(new.token_ids)
            step.positions[:, :count].copy_(new.positions)
            step.batch.slots[:count].copy_(new.batch.slots)
            step.batch.seq_lens[:count].copy_(new.batch.seq_lens)
            step.batch.block_tables[:count, :width].copy_(new.batch.block_tables)
            if count < size:
                step.token_ids[:, count:].zero_()
                step.positions[:, count:].zero_()
                step.batch.slots[count:].fill_(scratch * self.block_size)
                step.batch.seq_lens[count:].fill_(1)
                step.batch.block_tables[count:, : 1 + self.tail_blocks].fill_(scratch)
            replay()
        return self._logits[:count]

    def close(self) -> None:
        """Drop the graphs, then as `EagerRunner.close`."""
        self._graphs, self._sizes = {}, []
        super().close()
