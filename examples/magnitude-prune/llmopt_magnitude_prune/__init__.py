"""Magnitude pruning (Han et al. 2015): in every linear layer, the weights of least magnitude become zero."""

from __future__ import annotations

from fnmatch import fnmatchcase

import llmopt
from pydantic import Field


class MagnitudePrune(llmopt.Pass):
    """Sets the smallest weights of every linear layer to zero."""

    name = "magnitude_prune"
    provides = frozenset({"sparse_weights"})
    conflicts = frozenset({"quantized_weights"})

    class Config(llmopt.Options):
        sparsity: float = Field(0.2, ge=0, lt=1, description="Share of each layer's weights that becomes zero.")
        ignore: list[str] = Field(["lm_head"], description="Globs on module names that are left as they are.")

    def _targets(self, info: llmopt.ModelInfo) -> list[str]:
        return [name for name in info.linear_shapes if not any(fnmatchcase(name, p) for p in self.config.ignore)]

    def plan(self, info: llmopt.ModelInfo) -> llmopt.PlanItem:
        action = f"{self.config.sparsity:.0%} of the weights to zero"
        modules = []
        for name in self._targets(info):
            rows, columns = info.linear_shapes[name]
            size = rows * columns * info.dtype_bytes
            modules.append(llmopt.ModulePlan(name, action, size, size))
        return llmopt.PlanItem(f"{len(modules)} linear layers: {action}", modules)

    def run(self, model: llmopt.LoadedModel, context: llmopt.Context) -> llmopt.PassReport:
        import torch

        names = self._targets(context.info)
        layers = []
        for step, name in enumerate(names, 1):
            weight = model.module.get_parameter(f"{name}.weight")
            with torch.no_grad():
                count = int(weight.numel() * self.config.sparsity)
                order = weight.detach().abs().flatten().argsort(stable=True)
                weight.view(-1)[order[:count]] = 0
            layers.append({"name": name, "zeros": int((weight == 0).sum()), "of": weight.numel()})
            context.progress(step, len(names), name)
        return llmopt.PassReport(f"{len(names)} layers pruned to {self.config.sparsity:.0%}", layers=layers)
