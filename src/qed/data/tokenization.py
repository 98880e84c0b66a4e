"""Tokenizers of one backend (`tokenizers`), from a SentencePiece model, a tokenizer.json, or trained on the spot.

A SentencePiece BPE model becomes a tokenizer with the same pieces and the merges they imply: two pieces that join to a
third do so in the order of the third's score. Text is one word, spaces are "▁", and what no piece spells is bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BYTE_LEVEL = "bpe:"  # bpe:N trains N byte-level pieces
WORDS = "words:"  # words:N takes the N most frequent words
END = "<|end|>"


def is_trained(name: str) -> bool:
    """Whether `name` asks for a tokenizer made of the corpus itself. ValueError if it does so in a wrong way."""
    if name.startswith(BYTE_LEVEL):
        return _size(name, least=257) > 0
    return name.startswith(WORDS) and _size(name, least=3) > 0


def load(name: str, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer in a .model or .json file, or one made of `texts` if `name` is bpe:N or words:N."""
    if is_trained(name):
        kind, _, size = name.partition(":")
        return {BYTE_LEVEL: train, WORDS: words}[f"{kind}:"](texts, int(size))
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--tokenizer: expected a .model or .json file, bpe:N or words:N, got {name}: no such file")
    if path.suffix == ".model":
        return from_sentencepiece(path)
    if path.suffix == ".json":
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"--tokenizer: expected a tokenizer.json, got {name}: {error}") from error
        tokenizer.no_truncation()  # some files ask for it; a document is taken whole
        tokenizer.no_padding()
        return tokenizer
    raise ValueError(f"--tokenizer: expected a .model or .json file, bpe:N or words:N, got {name}")


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """Byte-level BPE; its token 0 ends documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def words(texts: Iterable[str], size: int) -> Tokenizer:
    """One token a word or mark, for corpora of few words; its token 0 ends documents, its token 1 is any other word."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|other|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="@@")  # no word begins so: spaces between all, none before marks
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=[END, "<|other|>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def from_sentencepiece(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model, which gives the same tokens. It needs the extra `sentencepiece`."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise ImportError(
            f"--tokenizer: {path} is a SentencePiece model, which cannot be read without the package sentencepiece; "
            "pip install 'qed-attention[sentencepiece]' installs it"
        ) from error
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"--tokenizer: expected a SentencePiece model, got {path}: {error}") from error
    count = model.get_piece_size()
    vocabulary = {model.id_to_piece(i): i for i in range(count)}
    score = {piece: model.get_score(i) for piece, i in vocabulary.items()}
    plain = [p for p, i in vocabulary.items() if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))]
    merges = [
        (score[piece], vocabulary[piece[:i]], vocabulary[piece[i:]], piece[:i], piece[i:])
        for piece in plain
        for i in range(1, len(piece))
        if piece[:i] in vocabulary and piece[i:] in vocabulary
    ]
    merges.sort(key=lambda x: (-x[0], x[1], x[2]))
    unknown = model.id_to_piece(model.unk_id())
    bytes_ = any(model.is_byte(i) for i in range(count))
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    controls = [model.id_to_piece(i) for i in range(count) if model.is_control(i) or model.is_unknown(i)]
    tokenizer.add_special_tokens(controls)
    return tokenizer


def ends(tokenizer: Tokenizer) -> tuple[int | None, int]:
    """The tokens a document begins and ends with: ⟨s⟩ and ⟨/s⟩, or our own end alone."""
    begin = tokenizer.token_to_id("<s>")
    for name in ("</s>", END, "<|endoftext|>"):
        end = tokenizer.token_to_id(name)
        if end is not None:
            return begin, end
    raise ValueError(f"--tokenizer: expected one with a token </s>, {END} or <|endoftext|> to separate documents")


def identity(tokenizer: Tokenizer) -> str:
    """sha256 of everything that decides which tokens a text becomes."""
    return hashlib.sha256(json.dumps(json.loads(tokenizer.to_str()), sort_keys=True).encode()).hexdigest()


def _size(name: str, least: int) -> int:
    kind, _, number = name.partition(":")
    try:
        size = int(number)
    except ValueError:
        size = 0
    if size < least:
        raise ValueError(f"--tokenizer: expected {kind}:N with N of {least} or more, got {name}")
    return size
