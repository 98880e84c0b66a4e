"""The tokenizer that transformers loads from a model's folder is ours: the same tokens for every text, and its ends."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from qed.data import tokenization
from qed.data.synthetic import documents
from qed.data.tokenizer_files import as_transformers, write_tokenizer
from tests.data.test_cutting import ODD, SHARED, mixed, sentencepiece_like

LLAMA = SHARED / "data" / "tokenizers" / "llama2.model"
KINDS = ["bpe", "words", "bytes", "no bytes", "llama2"]
TEXTS = [
    "",
    " ",
    "<|end|>a<|end|>",
    "<unk><s></s>",
    "<|other|>",
    "a ,b .c 's",
    *(mixed(seed, 12) for seed in range(20)),
]


def file_of(kind: str, folder: Path) -> Path:
    """The file of a tokenizer of each kind that `qed prepare` takes."""
    if kind == "llama2":
        if not LLAMA.exists():
            pytest.skip("Llama-2's tokenizer is not here")
        return LLAMA
    if "bytes" in kind:
        sentencepiece_like(folder, byte_fallback=kind == "bytes")
        return folder / "spm.model"
    texts = itertools.chain(documents(200), ODD * 5)
    made = tokenization.train(texts, 600) if kind == "bpe" else tokenization.words(texts, 300)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_our_tokens(kind: str, tmp_path: Path) -> None:
    """And our texts of them, even of tokens in no order."""
    (tmp_path / "source").mkdir(), (tmp_path / "model").mkdir()
    source = file_of(kind, tmp_path / "source")
    ours, numbers = tokenization.load(str(source)), write_tokenizer(source, tmp_path / "model")
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    draw, size = random.Random(0), ours.get_vocab_size()
    assert len(theirs) == size
    for tokenizer in (theirs, as_transformers(ours)):
        for text in TEXTS:
            ids = ours.encode(text).ids
            assert tokenizer(text).input_ids == tokenizer.encode(text, add_special_tokens=False) == ids
            for some in (ids, draw.choices(range(size), k=20)):
                for skip in (True, False):
                    assert tokenizer.decode(some, skip_special_tokens=skip) == ours.decode(
                        some, skip_special_tokens=skip
                    )
    begin, end = tokenization.ends(ours)
    assert theirs.eos_token_id == end
    assert theirs.bos_token_id == (end if begin is None else begin)
    assert theirs.pad_token_id == (end if begin is None else ours.token_to_id("<unk>"))
    assert numbers == {f"{name}_token_id": getattr(theirs, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    assert tokenization.identity(Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))) == (
        tokenization.identity(ours)
    )
    padded = theirs(["one", "one and two"], padding=True)
    assert padded.attention_mask[0][-1] == 0


def test_settings_of_transformers_are_kept_unless_they_ask_for_code(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir(), (tmp_path / "model").mkdir()
    source = file_of("words", tmp_path / "source")
    chosen = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|other|>", "pad_token": "<|end|>"}
    source.with_name("tokenizer_config.json").write_text(json.dumps(chosen))
    source.with_name("chat_template.jinja").write_text("{{ messages }}")
    assert write_tokenizer(source, tmp_path / "model") == {}
    again: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (again.eos_token, again.pad_token, again.chat_template) == ("<|other|>", "<|end|>", "{{ messages }}")
    source.with_name("tokenizer_config.json").write_text(json.dumps(chosen | {"auto_map": ["evil.Tokenizer", None]}))
    with pytest.raises(ValueError, match=r"expected a tokenizer that needs no code, got auto_map=\['evil.Tokenizer'"):
        write_tokenizer(source, tmp_path / "model")
