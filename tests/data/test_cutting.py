"""A long document's tokens, piece by piece, are those of the whole, with every kind of tokenizer that may be cut."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qed.data import cutting, tokenization
from qed.data.synthetic import documents
from qed.data.tokenization import from_sentencepiece, train, words

SHARED = Path(os.environ.get("QED_SHARED", Path(__file__).parents[3] / "shared"))
ODD = [
    "  ",
    " ",
    "\n",
    "\n\n ",
    "\t",
    "▁",
    "▁▁ ",
    "三言 两语",
    "🙂",
    "é",
    "e\u0301 ",
    "'s ",
    "can't",
    "12345 ",
    "<s>",
    "</s> ",
]
ODD += ["x" * 30, "…", "\u00a0", "\u200b", "\r\n", "ſ ", "A.B ", "\x00", " !!", "?\n ", "ß "]


def mixed(seed: int, parts: int) -> str:
    draw, plain = random.Random(seed), list(documents(20, seed=seed))
    return "".join(draw.choice(ODD) if draw.random() < 0.6 else draw.choice(plain)[:80] for _ in range(parts))


def sentencepiece_like(folder: Path, byte_fallback: bool) -> Tokenizer:
    (folder / "text").write_text("\n".join(itertools.chain(documents(300), ["三言 两语 é 12345", "a  b   c"])))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "spm"), vocab_size=600, model_type="bpe",
        byte_fallback=byte_fallback, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return from_sentencepiece(folder / "spm.model")


def with_pattern(pattern: str) -> Tokenizer:
    """As Qwen 2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(itertools.chain(documents(200), ODD * 5), trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {f"bytes {x}": sentencepiece_like(folder, x) for x in (True, False)}
    found |= {"byte level": train(itertools.chain(documents(200), ODD * 5), 600), "words": words(documents(200), 300)}
    found |= {pattern[33:70]: with_pattern(pattern) for pattern in cutting.PATTERNS}
    if (SHARED / "data" / "tokenizers").is_dir():
        for name in ("llama2", "mistral-v1"):
            found[name] = from_sentencepiece(SHARED / "data" / "tokenizers" / f"{name}.model")
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE", 40)
    monkeypatch.setattr(cutting, "LONGEST", 2000)


def test_pieces_have_the_tokens_of_the_whole(tokenizers: dict[str, Tokenizer], small: None) -> None:
    for name, tokenizer in tokenizers.items():
        encoder = cutting.Encoder(tokenizer)
        texts = [mixed(seed, 60) for seed in range(40)]
        may, _ = encoder._rule
        assert sum(len(list(cutting.cut(text, may))) for text in texts) > 10 * len(texts), name
        for text, found in zip(texts, encoder(texts), strict=True):
            assert found.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, (name, text)


@pytest.mark.parametrize("alphabet", ["aA .,'\n▁", None])
def test_of_any_text(alphabet: str | None, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at every place where it may be cut."""
    monkeypatch.setattr(cutting, "PIECE", 1)
    encoders = {name: cutting.Encoder(tokenizer) for name, tokenizer in tokenizers.items()}

    @given(st.text(alphabet, max_size=60) if alphabet else st.text(max_size=60))
    def check(text: str) -> None:
        for name, encoder in encoders.items():
            truth = tokenizers[name].encode(text, add_special_tokens=False).ids
            assert encoder([text])[0].tolist() == truth, name

    check()


def test_what_cannot_be_cut_is_refused(tokenizers: dict[str, Tokenizer], small: None) -> None:
    with pytest.raises(ValueError, match=r"one of 3,000 that begins with 'xxx.*no place where it may be cut was found"):
        cutting.Encoder(tokenizers["byte level"])(["x" * 3000])
    about = json.loads(tokenizers["byte level"].to_str())
    about["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(ValueError, match="this tokenizer's documents cannot be cut"):
        cutting.Encoder(Tokenizer.from_str(json.dumps(about)))(["a b " * 1000])
    added = Tokenizer.from_str(tokenizers["byte level"].to_str())
    added.add_tokens(["a b"])
    with pytest.raises(ValueError, match="this tokenizer's documents cannot be cut"):
        cutting.Encoder(added)(["a b " * 1000])


def test_a_tokenizer_trained_on_pieces_is_the_same(small: None) -> None:
    texts = [mixed(seed, 60) for seed in range(40)]
    pieces = [piece for text in texts for piece in cutting.cut(text, cutting.between_words)]
    assert len(pieces) > 5 * len(texts)
    for make in (train, words):
        assert tokenization.identity(make(pieces, 400)) == tokenization.identity(make(texts, 400))


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["spm.model", "bpe:300"])
def test_one_long_document_in_little_memory(tokenizer: str, tmp_path: Path) -> None:
    """4 MB in pieces of 0.1 MB. At once it takes some 400 MB; 100 MB in pieces of 1 MB are the same, larger."""
    text = " ".join(documents(200))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text * (4_000_000 // len(text))}) + "\n")
    if tokenizer == "spm.model":
        sentencepiece_like(tmp_path, byte_fallback=True)
        tokenizer = str(tmp_path / tokenizer)
    code = f"""
import resource
from pathlib import Path
from rich.console import Console
from qed.data import cutting
from qed.data.prepare import prepare
cutting.PIECE = 100_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = prepare({str(tmp_path / "x.jsonl")!r}, tokenizer={tokenizer!r}, out=Path({str(tmp_path / "out")!r}),
    console=Console(quiet=True))
assert index["documents"] == 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150
