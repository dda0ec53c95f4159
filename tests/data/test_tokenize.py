import numpy as np
import pytest
import tokenizers

from ptdbench.data.corpus import Tokenizer, documents, files_at
from tests.data import tiny_tokenizer
from tests.data.made import problem_of

NUMBERS = {"one": 1, "two": 2, "three": 3}
RHYME = "Ring-a-ring o' roses,\nA pocket full of pösies,\n\nA-tishoo! A-tishoo!\n  We all fall down.\n" * 5


@pytest.fixture
def corpus(tmp_path):
    def put(*texts):
        folder = tmp_path / "corpus"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
        return files_at(folder)

    return put


def tokens_of(path, files):
    return np.concatenate([piece.tokens for piece in Tokenizer(path).tokens(documents(files))])


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]"])
def test_documents_end_with_the_end_token(tmp_path, corpus, end):
    path = tiny_tokenizer.words(tmp_path / "t.json", NUMBERS | {end: 9})
    assert tokens_of(path, corpus("two one", "three four")).tolist() == [2, 1, 9, 3, 0, 9]


def test_end_token_is_optional_and_may_be_zero(tmp_path, corpus):
    path = tiny_tokenizer.words(tmp_path / "t.json", NUMBERS | {"<end>": 9})
    files = corpus("two one", "three")
    assert Tokenizer(path).end is None
    assert tokens_of(path, files).tolist() == [2, 1, 3]
    path = tiny_tokenizer.pairs(tmp_path / "t.json", RHYME)
    assert Tokenizer(path).end == 0
    assert tokens_of(path, files).tolist().count(0) == 2


def test_truncation_padding_and_templates_are_off(tmp_path, corpus):
    path = tiny_tokenizer.words(
        tmp_path / "t.json",
        NUMBERS | {"[CLS]": 8},
        post_processor=tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 8)]),
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=2, pad_id=7)
    tokenizer.save(str(path))
    assert tokenizer.encode("one two three").ids == [8, 1], "the file should ask for it"
    assert tokens_of(path, corpus("one two three", "one")).tolist() == [1, 2, 3, 1]


def test_long_documents_arrive_whole(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("ptdbench.data.corpus._BLOCK_BYTES", 64)
    monkeypatch.setattr("ptdbench.data.corpus._BATCH", 2)
    path = tiny_tokenizer.pairs(tmp_path / "t.json", RHYME)
    pieces = list(Tokenizer(path).tokens(documents(corpus(RHYME, RHYME[:20]))))
    assert len(pieces) > 3
    assert sum(piece.bytes for piece in pieces) == len(RHYME.encode()) + 20
    tokens = np.concatenate([piece.tokens for piece in pieces])
    assert tokens.dtype == np.uint16
    assert len(tokens) < len(RHYME)
    decode = tokenizers.Tokenizer.from_file(str(path)).decode
    assert decode(tokens.tolist(), skip_special_tokens=False) == f"{RHYME}<|endoftext|>{RHYME[:20]}<|endoftext|>"


def test_tokens_equal_the_librarys(tmp_path, corpus):
    path = tiny_tokenizer.pairs(tmp_path / "t.json", RHYME)
    encode = tokenizers.Tokenizer.from_file(str(path)).encode
    files = corpus(RHYME, b"two \xffne")  # what is no UTF-8 is replaced
    assert tokens_of(path, files).tolist() == [*encode(RHYME).ids, 0, *encode("two \ufffdne").ids, 0]


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_dtype_follows_the_largest_token(tmp_path, corpus, largest, dtype):
    path = tiny_tokenizer.words(tmp_path / "t.json", {"far": largest})
    tokenizer = Tokenizer(path)
    assert tokenizer.size == largest + 1
    assert tokenizer.dtype == dtype
    tokens = tokens_of(path, corpus("far"))
    assert (tokens.dtype, tokens.tolist()) == (dtype, [largest])


def test_the_digest_is_that_of_the_file(tmp_path):
    files = {"1": NUMBERS, "2": NUMBERS, "3": NUMBERS | {"four": 4}}
    first, same, other = (
        Tokenizer(tiny_tokenizer.words(tmp_path / name, words)).digest for name, words in files.items()
    )
    assert first == same != other


def test_missing_tokenizer_is_refused(tmp_path):
    problem = problem_of(Tokenizer, path=tmp_path / "gpt2")
    assert problem.option == "tokenizer"
    assert "No such file" in problem.rule
    assert "path of a tokenizer.json" in problem.remedy
    assert problem_of(Tokenizer, path=tmp_path).remedy == ""
    inside = tiny_tokenizer.words(tmp_path / "tokenizer.json", NUMBERS)
    problem = problem_of(Tokenizer, path=tmp_path)
    assert (problem.rule, problem.remedy) == ("is a folder", f"try {inside}")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"no JSON", b'{"model_type": "gpt2"}'])
def test_invalid_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert "is not a Hugging Face tokenizer.json" in problem_of(Tokenizer, path=path).rule
