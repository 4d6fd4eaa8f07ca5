"""What a load keeps in memory, and what it holds still while it runs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from llmopt.optimizer.errors import RunError
from llmopt.runtime.garbage import collection_paused
from llmopt.runtime.mapped_tensor import MappedTensor, drop_file_pages
from llmopt.runtime.memory import parse_size
from llmopt.runtime.tensor_files import locate
from safetensors.torch import save_file

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def resident(key: str = "VmRSS") -> int:
    """Bytes of this process, by a line of /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return 1024 * int(line.split()[1])


@linux
def test_the_kv_pool_becomes_resident_as_it_is_written() -> None:
    from llmopt.runtime.kernels.attention import allocate_kv
    from llmopt.runtime.kernels.build import unavailable_reason

    if reason := unavailable_reason():
        pytest.skip(reason)
    before = resident()
    keys, values = allocate_kv(512, 32, 4, 64, torch.bfloat16, num_layers=8)
    assert keys.nbytes + values.nbytes == 128 << 20
    assert resident() - before < 8 << 20
    assert not keys[3, 17].any() and not values[7, 511].any()
    keys.fill_(1)
    assert resident() - before > 60 << 20


@linux
def test_a_mapped_tensor_gives_its_pages_back(tmp_path: Path) -> None:
    want = torch.arange(8 << 20, dtype=torch.int32).view(torch.bfloat16).view(4096, -1)
    save_file({"small": torch.ones(3), "table": want}, tmp_path / "model.safetensors")
    mapped = MappedTensor(locate([tmp_path / "model.safetensors"])["table"], torch.bfloat16)
    before = resident("RssFile")
    assert torch.equal(mapped.tensor.view(torch.int16), want.view(torch.int16))
    assert resident("RssFile") - before > 28 << 20
    mapped.drop_pages()
    assert resident("RssFile") - before < 4 << 20
    assert torch.equal(mapped.tensor.view(torch.int16), want.view(torch.int16))


@linux
def test_pages_of_mapped_weights_are_given_back_unless_written(tmp_path: Path) -> None:
    from safetensors import safe_open

    file, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    want = torch.arange(4 << 20, dtype=torch.int32)
    for path in (file, other):
        save_file({"table": want}, path)
    with safe_open(file, "pt") as one, safe_open(other, "pt") as two:
        kept, untouched = one.get_tensor("table"), two.get_tensor("table")
    assert torch.equal(kept, want) and torch.equal(untouched, want)
    before = resident("RssFile")
    assert drop_file_pages([file]) == 1
    assert 14 << 20 < before - resident("RssFile") < 20 << 20
    assert torch.equal(kept, want)
    kept[5] = -1
    assert drop_file_pages([file]) == 0
    assert kept[5] == -1 and torch.equal(kept[6:], want[6:])
    assert drop_file_pages([tmp_path / "none.safetensors"]) == 0


def test_a_mapped_tensor_of_another_dtype_is_a_copy(tmp_path: Path) -> None:
    want = torch.randn(16, 8)
    file = tmp_path / "model.safetensors"
    save_file({"table": want, "none": torch.empty(0, 4)}, file)
    stored = locate([file])
    mapped = MappedTensor(stored["table"], torch.bfloat16)
    mapped.drop_pages()
    assert torch.equal(mapped.tensor, want.bfloat16())
    assert MappedTensor(stored["none"], torch.float32).tensor.shape == (0, 4)
    file.unlink()
    with pytest.raises(RunError, match="cannot be mapped"):
        MappedTensor(stored["table"], torch.float32)


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("512 mib", 2**29), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
