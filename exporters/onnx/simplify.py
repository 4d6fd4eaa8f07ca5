"""Has onnxruntime simplify a written graph: its basic level, which leaves operators that every runtime has."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...optimizer.errors import MissingDependency, RunError
from .graph import DATA, INLINE, MODEL, onnx_library

WORK = "simplified"
"""Folder inside the export, for as long as it takes."""


def simplify(folder: Path, external: bool, keep_casts: bool) -> dict[str, int]:
    """Replace model.onnx (and its data) by the simplified graph. Returns the numbers of nodes, `before` and `after`.

    keep_casts: fold no constants, so that weights stored in bfloat16 stay so. Raises RunError where onnxruntime cannot,
    MissingDependency without it.
    """
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency("onnxruntime", "onnx", "simplify=true") from None
    work = folder / WORK
    work.mkdir()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(work / MODEL)
    if external:
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", DATA)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(INLINE))
    try:
        without = ["ConstantFolding"] if keep_casts else []
        before = _count(folder)
        onnxruntime.InferenceSession(
            str(folder / MODEL), options, providers=["CPUExecutionProvider"], disabled_optimizers=without
        )
        found = {"before": before, "after": _count(work)}
        for name in (MODEL, DATA):
            (folder / name).unlink(missing_ok=True)
            if (work / name).is_file():
                (work / name).replace(folder / name)
        return found
    except Exception as error:  # onnxruntime raises kinds of its own that share no base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(f"onnxruntime does not simplify the graph ({first[:300]})", str(folder)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _count(folder: Path) -> int:
    return len(onnx_library().load(str(folder / MODEL), load_external_data=False).graph.node)
