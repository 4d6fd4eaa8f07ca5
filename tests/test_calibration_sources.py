"""Calibration tokens: text, chats, data sets, the model's own text; windows, BOS, hashes, and errors that say where."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llmopt.optimizer.calibration import (
    LENGTH_STEP,
    BeginningOfSequence,
    Calibration,
    TextSource,
    beginnings,
    spread_windows,
)
from llmopt.optimizer.calibration_sources import ChatSource, DatasetSource
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.optimizer.recipe import Recipe

from .conftest import build_tokenizer

WORDS = "the house stood at the end of a long road and nobody had lived in it for many years "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def with_bos(tokenizer: Any) -> Any:
    """The same tokenizer with a post-processor that puts BOS in front of texts."""
    import copy

    from tokenizers.processors import TemplateProcessing

    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", other.bos_token_id)]
    )
    return other


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def dataset(name: str | Path, seed: int = 0, **options: Any) -> DatasetSource:
    settings = {"column": None, "config": None, "split": "train", "revision": None, **options}
    return DatasetSource(str(name), seed, **settings)


def sequences(calibration: Calibration) -> list[list[int]]:
    return [batch[0].tolist() for batch in calibration.batches()]


# windows


def test_windows_lie_inside_one_document_and_are_spread_evenly() -> None:
    documents = [list(range(0, 10)), list(range(100, 125))]
    assert spread_windows(documents, 10, 3) == [documents[0], documents[1][:10], documents[1][10:20]]
    assert spread_windows([list(range(100))], 10, 2) == [list(range(10)), list(range(50, 60))]
    assert spread_windows([[1, 2]], 10, 3) == []


def test_beginnings_fill_the_budget_without_mixing_documents() -> None:
    documents = [[1] * 40, [2] * 100, [3] * 15, [4] * 70]
    found = beginnings(iter(documents), 64, 10_000)
    assert [(d[0], len(d)) for d in found] == [(2, 64), (4, 64), (1, 32)]
    assert all(len(set(d)) == 1 for d in found)
    assert sum(map(len, beginnings(documents, 64, 96))) == 96
    further = beginnings(documents, 32, 10_000, further=True)
    assert [(d[0], len(d)) for d in further] == [(1, 32), (2, 32), (4, 32), (2, 32), (4, 32), (2, 32)]
    assert beginnings([[1] * 10], 8, 100) == [[1] * 8]


# text and BOS


def test_a_text_without_bos(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 40)
    calibration = Calibration(tokenizer, str(tmp_path / "a.txt"), 4, 32)
    assert not calibration.used
    found = sequences(calibration)
    ids = tokenizer(WORDS * 40, add_special_tokens=False)["input_ids"]
    count = len(ids) // 32
    assert found == [ids[(i * count // 4) * 32 :][:32] for i in range(4)] and calibration.used
    said = calibration.describe()
    flat = ",".join(str(token) for sequence in found for token in sequence)
    assert said["sha256"] == hashlib.sha256(flat.encode()).hexdigest()
    assert (said["source"], said["text"], said["num_tokens"], said["num_samples"]) == ("text", "a.txt", 128, 4)
    assert said["bos"] is False and said["bos_sequences"] == 0 and "does not put it" in said["bos_reason"]
    assert calibration.shortfall == 0 and Calibration(tokenizer, str(tmp_path / "a.txt"), 10_000, 32).shortfall > 0


def test_bos_where_the_tokenizer_puts_it(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 40)
    calibration = Calibration(with_bos(tokenizer), str(tmp_path / "a.txt"), 3, 32)
    found = sequences(calibration)
    assert all(len(s) == 32 and s[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in s[1:] for s in found)
    said = calibration.describe()
    assert said["bos"] is True and said["bos_sequences"] == 3 and "in front of every text" in said["bos_reason"]


def test_a_tokenizer_without_bos(tokenizer: Any) -> None:
    import copy

    other = copy.deepcopy(tokenizer)
    other.bos_token = None
    assert BeginningOfSequence.of(other) == BeginningOfSequence(None, "the tokenizer has no BOS token")


# chats


def conversation(number: int, turns: int = 3) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {number} {turn}: {WORDS}"})
        messages.append({"role": "assistant", "content": f"answer {number} {turn}: {WORDS}"})
    return {"messages": messages}


def test_chats_go_through_the_template_from_their_beginning(tokenizer: Any, tmp_path: Path) -> None:
    rows: list[Any] = [conversation(i) for i in range(6)]
    rows[2] = rows[2]["messages"]  # a bare list is a conversation too
    path = lines(tmp_path / "chats.jsonl", rows)
    calibration = Calibration(tokenizer, ChatSource(path, 0), 4, 64)
    found = sequences(calibration)
    rendered = [
        tokenizer.apply_chat_template(row["messages"] if isinstance(row, dict) else row, return_dict=False)
        for row in rows
    ]
    assert len(found) == 4 and all(len(s) == 64 and s in [r[:64] for r in rendered] for s in found)
    assert len({tuple(s) for s in found}) == 4
    assert sequences(Calibration(tokenizer, ChatSource(path, 0), 4, 64)) == found
    assert sequences(Calibration(tokenizer, ChatSource(path, 1), 4, 64)) != found
    said = calibration.describe()
    assert (said["source"], said["chat"], said["num_tokens"]) == ("chat", "chats.jsonl", 256)


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        ('{"messages": [}', "c.jsonl:1", "not JSON"),
        ('\n{"text": "no chat"}', "c.jsonl:2", "no list of messages"),
        ('[{"role": "user"}]', "c.jsonl:1", "no list of messages"),
        ("[]", "c.jsonl:1", "no list of messages"),
        ("[" * 100_000, "c.jsonl:1", "not JSON"),
        ("", "c.jsonl", "0 tokens"),
    ],
)
def test_a_bad_chat_is_named_by_its_line(tokenizer: Any, tmp_path: Path, content: str, where: str, what: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(RunError) as caught:
        Calibration(tokenizer, ChatSource(tmp_path / "c.jsonl", 0), 2, 32).batches()
    assert where in str(caught.value) and what in str(caught.value)


def test_chats_need_a_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    path = lines(tmp_path / "c.jsonl", [conversation(0)])
    with pytest.raises(RunError, match="no chat template"):
        Calibration(other, ChatSource(path, 0), 2, 32).batches()


# data sets


def test_rows_of_a_jsonl_are_documents(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"id": i, "text": f"{i} " + WORDS * (1 + i)} for i in range(5)]
    path = lines(tmp_path / "d.jsonl", rows)
    marked = with_bos(tokenizer)
    calibration = Calibration(marked, dataset(path), 100, 24)
    found = sequences(calibration)
    texts = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows]
    for sequence in found:
        assert sequence[0] == marked.bos_token_id
        body = sequence[1:]
        assert any(body == t[i : i + len(body)] for t in texts for i in range(0, len(t), 23)), "not one document's"
        assert len(body) == 23 or len(body) % LENGTH_STEP == 0
    assert [len(s) for s in found] == sorted((len(s) for s in found), reverse=True)
    said = calibration.describe()
    assert (said["dataset"], said["column"], said["rows"]) == ("d.jsonl", "text", 5)


def test_the_column_is_found_or_asked_for(tokenizer: Any, tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", [{"id": 1, "body": WORDS * 9}])
    assert Calibration(tokenizer, dataset(one), 1, 32).describe()["column"] == "body"
    two = lines(tmp_path / "two.jsonl", [{"a": WORDS * 9, "b": WORDS}])
    with pytest.raises(RunError, match=r"calibration\.column: a, b"):
        Calibration(tokenizer, dataset(two), 1, 32).batches()
    assert Calibration(tokenizer, dataset(two, column="a"), 1, 32).num_tokens == 32
    with pytest.raises(RunError, match=r"no column 'c'.*Its columns are a, b"):
        Calibration(tokenizer, dataset(two, column="c"), 1, 32).batches()
    number = lines(tmp_path / "number.jsonl", [{"text": 5}])
    with pytest.raises(RunError, match=r"row 0.*holds int, not text"):
        Calibration(tokenizer, dataset(number), 1, 32).batches()
    half = lines(tmp_path / "half.jsonl", [{"text": WORDS + "\ud800"}])
    with pytest.raises(RunError, match=r"row 0.*half of a surrogate pair"):
        Calibration(tokenizer, dataset(half), 1, 32).batches()
    chats = lines(tmp_path / "chats.jsonl", [conversation(0)])
    assert sequences(Calibration(tokenizer, dataset(chats), 1, 32))[0][:1] == tokenizer("<|user|>")["input_ids"][:1]


def test_data_sets_of_the_library(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Rows:
        column_names = ("text",)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, key: Any) -> Any:
            rows = [f"{i} {WORDS * 8}" for i in range(3)]
            return rows if key == "text" else {"text": rows[key]}

    def load_dataset(name: str, config: Any = None, **options: Any) -> Rows:
        asked.append((name, config, options))
        if name == "nobody/nothing":
            raise ConnectionError("cannot reach the hub\nsecond line")
        return Rows()

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    hub = dataset("someone/texts", config="small", split="test", revision="abc")
    assert Calibration(tokenizer, hub, 2, 32).num_tokens == 64
    (tmp_path / "t.parquet").write_bytes(b"")
    assert Calibration(tokenizer, dataset(tmp_path / "t.parquet"), 2, 32).num_tokens == 64
    assert asked == [
        ("someone/texts", "small", {"split": "test", "revision": "abc"}),
        ("parquet", None, {"data_files": str(tmp_path / "t.parquet"), "split": "train"}),
    ]
    with pytest.raises(RunError, match=r"cannot be loaded: cannot reach the hub.*without a network") as caught:
        Calibration(tokenizer, dataset("nobody/nothing"), 2, 32).batches()
    assert "\n" not in str(caught.value)
    (tmp_path / "t.xml").write_text("<a/>")
    with pytest.raises(RunError, match=r"cannot end in '\.xml'"):
        Calibration(tokenizer, dataset(tmp_path / "t.xml"), 2, 32).batches()


def test_without_the_library_the_extra_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RunError, match=r"llmopt\[datasets\]"):
        Calibration(tokenizer, dataset("someone/texts"), 2, 32).batches()


def test_real_parquet(tokenizer: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"{i} {WORDS * 4}" for i in range(4)]})
    rows.to_parquet(str(tmp_path / "t.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"))
    a = sequences(Calibration(tokenizer, dataset(tmp_path / "t.parquet"), 2, 32))
    assert len(a) == 2 and sequences(Calibration(tokenizer, dataset(tmp_path / "saved"), 2, 32)) == a


# recipes


def recipe(section: str, passes: str = "passes: [kv_cache]") -> Any:
    return Recipe.parse(f"{passes}\n{section}").recipe.calibration


def test_what_a_recipe_takes() -> None:
    gptq, rtn = "passes: [quantize: {method: gptq}]", "passes: [quantize: {method: rtn}]"
    plain = recipe("", rtn)
    assert (plain.source, plain.text, plain.num_samples, plain.sequence_length) == ("text", "default", 32, 512)
    own_text = recipe("", gptq)
    assert (own_text.source, own_text.num_samples, own_text.sequence_length) == ("self", 32, 256)
    override = "passes: [quantize: {method: rtn, overrides: {'*.v_proj': {method: gptq}}}]"
    assert recipe("", override).source == "self"
    assert recipe("calibration: {num_samples: 7}", gptq).source == "text"
    assert recipe("calibration: {source: self, num_samples: 7}").num_samples == 7
    assert recipe("calibration: {dataset: someone/texts, split: test}").source == "dataset"


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("{chat: a.jsonl, dataset: b}", "chat and dataset are named"),
        ("{source: chat}", "source: chat needs `chat`"),
        ("{source: self, dataset: b}", "dataset and source: self are named"),
        ("{column: x}", "`column` belongs to a dataset"),
        ("{source: selfish}", "'selfish'"),
        ("{chat: nowhere.jsonl}", "no such file of chats: nowhere.jsonl"),
        ("{dataset: nowhere.parquet}", "no such data set: nowhere.parquet"),
        ("{datasets: a}", "did you mean 'dataset'"),
    ],
)
def test_what_a_recipe_refuses(section: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipe(f"calibration: {section}")
    assert what.lower() in str(caught.value).lower() and "<recipe>:2" in str(caught.value)


def test_files_are_found_beside_the_recipe(tmp_path: Path) -> None:
    lines(tmp_path / "c.jsonl", [conversation(0)])
    (tmp_path / "r.yaml").write_text("passes: [kv_cache]\ncalibration: {chat: c.jsonl}\n")
    assert Recipe.load(tmp_path / "r.yaml").recipe.calibration.chat == str(tmp_path / "c.jsonl")


def test_an_artifact_records_its_source(tiny_model: Path, tmp_path: Path) -> None:
    import llmopt

    path = lines(tmp_path / "c.jsonl", [conversation(i) for i in range(8)])
    artifact = llmopt.optimize(
        tiny_model,
        passes=[{"quantize": {"method": "gptq", "group_size": 32}}],
        out=tmp_path / "out",
        calibration={"chat": str(path), "num_samples": 4, "sequence_length": 64},
        evaluate={"windows": 2, "window_length": 64, "speed": False, "new_tokens": 4, "prompts": ["Once"]},
    )
    said = artifact.manifest.calibration
    assert said["source"] == "chat" and said["chat"] == "c.jsonl" and said["num_tokens"] == 256


def test_identities_follow_the_contents(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", [conversation(0)])
    before = ChatSource(path, 0).identity(), dataset(path).identity()
    assert ChatSource(path, 1).identity() != before[0] and TextSource("default").identity()
    lines(path, [conversation(1)])
    assert ChatSource(path, 0).identity() != before[0] and dataset(path).identity() != before[1]
