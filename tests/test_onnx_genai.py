"""What onnxruntime-genai itself generates from a folder: the greedy text of torch, for every family.

In a process of its own, since it brings an onnxruntime of its own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import llmopt
import pytest
from llmopt.tests.onnx_models import FAMILIES, save_family, write_graph

pytest.importorskip("onnx")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed"
)

PROMPTS = ["The sea", "a", "Once upon a time there was a fisherman who lived with his wife by the sea", "water"]
TOKENS = 10
PROGRAM = """
import json, sys
import numpy as np
import onnxruntime_genai as og

folder, prompts, tokens, pad = json.load(sys.stdin)
model = og.Model(folder)

def generate(rows):
    params = og.GeneratorParams(model)
    longest = max(map(len, rows))
    total = longest + tokens
    params.set_search_options(max_length=total, min_length=total, batch_size=len(rows), do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([row + [pad] * (longest - len(row)) for row in rows], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [list(map(int, generator.get_sequence(row)))[longest:] for row in range(len(rows))]

print(json.dumps([[generate([row])[0] for row in prompts], generate(prompts)]))
"""


@pytest.mark.parametrize("name", FAMILIES)
def test_genai_writes_the_text_of_torch(name, tmp_path):
    """One prompt at a time, and prompts of unequal length as one batch."""
    source = save_family(name, tmp_path / "source")
    write_graph(source, tmp_path / "out")
    with llmopt.load(source, engine="static", dtype="float32", device="cpu") as llm:
        found = llm.generate(PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
        pad = llm.tokenizer.pad_token_id if llm.tokenizer.pad_token_id is not None else 1
    asked = [str(tmp_path / "out"), [one.prompt_token_ids for one in found], TOKENS, pad]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [one.token_ids for one in found]
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, expected]
