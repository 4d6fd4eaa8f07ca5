"""Incremental text equals whole decoding, never shows half a character, and stops at the right letter."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.runtime.engine.detokenizer import Detokenizer, StopStrings, TextStream, Vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["Hello, world! Stop here. The quick brown fox — naïve café.", "def f(x):\n    return x\n", "日本語 and 中文"]
TEXTS = [*CORPUS, "🤖👩‍👩‍👧 family, Ωmega, ﷽", "  two spaces   three", "a\r\n\tb", "👍🏽" * 5]


def byte_level():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


def sentencepiece():
    pieces = ["<unk>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvwxyzHTS.,!", "▁a", "▁t"]
    core = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "t")], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


def wordpiece():
    """A kind the byte tables do not cover: decoded through the tokenizer itself."""
    words = ["[UNK]", "hello", "##s", "world", "!", "stop", "the", "##re", "a"]
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def vocabularies():
    return {"byte_level": Vocabulary(byte_level()), "sentencepiece": Vocabulary(sentencepiece())}


def generic(vocabulary):
    copy = Vocabulary(vocabulary.tokenizer)
    copy._kind = None
    return copy


def stream(vocabulary, ids, prompt=(), **options):
    detokenizer = Detokenizer(vocabulary, prompt, **options)
    pieces = [detokenizer.push(i) for i in ids]
    return pieces, "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("path", ["bytes", "tokenizer"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_are_whole_characters(vocabularies, kind, path, text):
    vocabulary = vocabularies[kind]
    assert vocabulary.exact
    if path == "tokenizer":
        vocabulary = generic(vocabulary)
    prompt = vocabulary.tokenizer.encode("a", add_special_tokens=False)
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    whole = vocabulary.tokenizer.decode(prompt + ids)
    before = vocabulary.tokenizer.decode(prompt)
    pieces, joined = stream(vocabulary, ids, prompt)
    assert joined == whole[len(before) :]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_of_several_tokens_comes_at_once(vocabularies, kind):
    vocabulary = vocabularies[kind]
    ids = vocabulary.tokenizer.encode("🤖", add_special_tokens=False)
    ids = ids[-4:]
    for path in (vocabulary, generic(vocabulary)):
        pieces, _ = stream(path, ids, vocabulary.tokenizer.encode("a", add_special_tokens=False))
        assert pieces == ["", "", "", "🤖"]


def test_random_ids_equal_whole_decoding(vocabularies):
    rng = random.Random(0)
    vocabulary = vocabularies["byte_level"]
    for _ in range(200):
        ids = [rng.randrange(len(vocabulary.tokenizer)) for _ in range(12)]
        assert stream(vocabulary, ids)[1] == vocabulary.tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_left_out_or_kept(vocabularies):
    vocabulary = vocabularies["byte_level"]
    eos = vocabulary.tokenizer.eos_token_id
    ids = [*vocabulary.tokenizer.encode("Hello"), eos]
    assert stream(vocabulary, ids)[1] == "Hello"
    assert stream(vocabulary, ids, skip_special_tokens=False)[1] == "Hello<eos>"
    assert stream(vocabulary, [10**6])[1] == ""


def test_an_unfinished_character_is_shown_at_the_end_only(vocabularies):
    vocabulary = vocabularies["byte_level"]
    ids = vocabulary.tokenizer.encode("🤖")[:-1]
    pieces, joined = stream(vocabulary, ids)
    assert "".join(pieces) == "" and joined == "\ufffd"


def test_other_kinds_go_through_the_tokenizer():
    vocabulary = Vocabulary(wordpiece())
    assert not vocabulary.exact
    ids = vocabulary.tokenizer.encode("hellos world! there a stop hellos hellos world world", add_special_tokens=False)
    for cut in range(1, len(ids)):
        joined = stream(vocabulary, ids[cut:], ids[:cut])[1]
        assert vocabulary.tokenizer.decode(ids[:cut]) + joined == vocabulary.tokenizer.decode(ids)


# -- stop strings


def cut_reference(text, stops, include):
    """Letter by letter: the first stop string to be complete; of several at once, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab-", max_size=14)


@settings(max_examples=300, deadline=None)
@given(letters, st.lists(st.text(alphabet="ab-", min_size=1, max_size=4), max_size=3), st.booleans(), st.data())
def test_stop_strings_do_not_depend_on_the_cuts(text, stops, include, data):
    expected, stop = cut_reference(text, stops, include)
    matcher, out, place = StopStrings(stops, include), "", 0
    while place < len(text) and matcher.matched is None:
        size = data.draw(st.integers(1, len(text) - place))
        out += matcher.push(text[place : place + size])
        place += size
        assert expected.startswith(out)  # nothing is shown that would have to be taken back
    if matcher.matched is None:
        out += matcher.flush()
    if stop is not None and len(text) > place and matcher.matched is None:
        raise AssertionError("unreachable")
    assert out == expected and matcher.matched == stop


def test_text_is_held_back_only_as_long_as_needed():
    matcher = StopStrings(["STOP", "\n\n"])
    assert matcher.push("go S") == "go "
    assert matcher.push("T") == ""
    assert matcher.push("ART\n") == "START"
    assert matcher.push("x") == "\nx"
    assert matcher.push("STOP now") == "" and matcher.matched == "STOP"


def test_a_stop_string_across_tokens_and_inside_one(vocabularies):
    vocabulary = vocabularies["byte_level"]
    ids = vocabulary.tokenizer.encode("Hello, world! Stop here.")
    for stops, expected in ((["d! St"], "Hello, worl"), (["o"], "Hell"), (["absent"], "Hello, world! Stop here.")):
        stream_ = TextStream(vocabulary, stops=stops)
        text = ""
        for i in ids:
            text += stream_.push(i)
            if stream_.matched:
                break
        assert text + stream_.finish() == expected


def test_a_stop_string_that_only_the_last_bytes_complete(vocabularies):
    vocabulary = vocabularies["byte_level"]
    stream_ = TextStream(vocabulary, stops=["\ufffd"])
    text = "".join(stream_.push(i) for i in vocabulary.tokenizer.encode("a🤖")[:-1])
    assert text + stream_.finish() == "a" and stream_.matched == "\ufffd"
