"""A look inside: the page keeps what there is, what it cannot show is said, and what is wrong leaves nothing."""

import base64
import json
import re
import shutil
from functools import lru_cache
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer
from typer.testing import CliRunner

from qed import QEDConfig, QEDForCausalLM
from qed.analysis.look import look_inside
from qed.cli import app
from qed.data import tokenization
from qed.data.synthetic import document
from qed.report import look
from qed.report.look import MOST_BYTES, MOST_TOKENS, read_text, sources_for, write_look
from qed.report.thinning import FINE, LEVELS, Sources, bytes_per_token, head, series, state_picture, strongest

runner = CliRunner()
QUIET = Console(quiet=True)
TEXT = "The baker forgot a lamp. Remember kinu kuhi. Her brother painted the harbour. Recall kinu"
KINDS = {"uint16": "<u2", "uint8": "u1", "int8": "i1", "int16": "<i2", "float32": "<f4"}


@lru_cache
def words() -> Tokenizer:
    """A tokenizer that the tests share; none of them changes it."""
    return tokenization.words((document(i) for i in range(300)), 512)


def checkpoint(folder: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = QEDConfig.mini(**({"initializer_range": 0.3, "theta_init": 1.0} | changes))
    QEDForCausalLM(config).save_pretrained(folder)
    (tokenizer or words()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("look") / "model")


def shown(page: Path) -> dict[str, Any]:
    """What is on a page, as its script reads it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def unpacked(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=KINDS[kind])


def thinned(packed: dict[str, str], tokens: int) -> Sources:
    kinds = {"index": "uint16", "level": "int8", "scale": "float32", "share": "uint8", "beside": "int16"}
    arrays = {name: unpacked(packed[name], kind) for name, kind in kinds.items() if name in packed}
    return Sources(**{k: x if k in ("scale", "share") else x.reshape(tokens, -1) for k, x in arrays.items()})


def restored(kept: Sources, tokens: int) -> np.ndarray:
    """The map that a page can draw: [T, T], with 0 where nothing is kept."""
    found = np.zeros((tokens, tokens))
    for t in range(tokens):
        for place, level in zip(kept.index[t], kept.level[t], strict=True):
            if level:
                found[t, place] = level / LEVELS * kept.scale[t]
    return found


maps = st.integers(1, 12).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(-1e3, 1e3, width=32, allow_subnormal=False), min_size=n, max_size=n), min_size=n, max_size=n
    )
)


@given(rows=maps, count=st.integers(1, 14))
def test_the_strongest_sources_are_kept_and_nothing_else(rows: list[list[float]], count: int) -> None:
    """No source that is left out is larger than one that is kept, and kept values are right to half a level."""
    whole = torch.tensor(rows).tril()
    tokens, exact = len(rows), whole.numpy().astype(float)
    kept = strongest(whole, count)
    found = restored(kept, tokens)
    for t in range(tokens):
        held, sizes = found[t] != 0, abs(exact[t])
        assert (kept.level[t] != 0).sum() == held.sum() <= count  # every place once
        half = sizes.max() / LEVELS / 2
        assert (abs(found[t] - exact[t])[held] <= half * 1.001).all()
        if held.sum() < min(count, tokens):  # there was room: what is left out rounds to 0
            assert (sizes[~held] <= half * 1.001).all()
        elif held.any() and (~held).any():
            assert sizes[~held].max() <= sizes[held].min()
        assert list(sizes[kept.index[t]]) == sorted(sizes[kept.index[t]], reverse=True)
        share = sizes[held].sum() / sizes.sum() if sizes.any() else 1.0
        assert share - 1 / 255 - 1e-6 <= kept.share[t] / 255 <= share + 1e-6  # never more than there is


def test_values_beside_are_the_other_maps_at_the_same_places() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 30, 30).tril()
    kept = strongest(one, 7, other)
    assert kept.beside is not None
    for t in range(30):
        most = float(other[t].abs().max())
        assert np.allclose(kept.beside[t] / FINE * most, other[t].numpy()[kept.index[t]], rtol=0, atol=most / FINE)


def test_series_and_states_are_right_to_their_last_bit() -> None:
    torch.manual_seed(0)
    values = torch.rand(50) * 3
    packed = series(values)
    assert packed["most"] == float(values.max())
    assert np.allclose(
        unpacked(packed["values"], "uint16") / 65535 * packed["most"], values, atol=packed["most"] / 65535
    )
    states = torch.rand(9, 70, 5).double()  # norms of rows of 5 columns each, 70 of them: three are taken together
    picture = state_picture(states.norm(dim=-1))
    assert (picture["together"], picture["rows"]) == (3, 24)
    found = unpacked(picture["values"], "uint8").reshape(9, 24) / 255 * picture["most"]
    expected = torch.stack([states[:, i : i + 3].flatten(1).norm(dim=-1) for i in range(0, 70, 3)], -1)
    assert np.allclose(found, expected, rtol=0, atol=picture["most"] / 255)


def test_the_page_holds_what_the_layers_do(model: Path, tmp_path: Path) -> None:
    page = write_look(model, TEXT, tmp_path / "look.html", tokenizer=None, device="cpu", console=QUIET)
    data, tokens = shown(page), 18
    assert [x.strip() for x in data["tokens"]] == TEXT.replace(".", " .").split()
    assert "".join(data["tokens"]) == TEXT
    ids = torch.tensor([read_text(TEXT, words()).ids])
    loaded = QEDForCausalLM.from_pretrained(model).eval()
    layers = dict(look_inside(loaded, ids))
    assert [(x["layer"], x["head"]) for x in sorted(data["heads"], key=lambda x: (x["layer"], x["head"]))] == [
        (i, h) for i in range(2) for h in range(2)
    ]
    changes = [x["change"] for x in data["heads"]]
    assert changes == sorted(changes, reverse=True)
    for x in data["heads"]:
        found, h = layers[x["layer"]], x["head"]
        assert found.forgotten is not None
        assert found.change is not None
        assert x["change"] == pytest.approx(float(found.change[0, h]), rel=1e-4)
        # All 18 sources fit, so that the whole map is on the page, but for what rounds to 0.
        for kept, whole in (("read", found.attention[0, h]), ("lost", found.forgotten[0, h])):
            got, sizes = restored(thinned(x[kept], tokens), tokens), whole.abs().amax(-1, keepdim=True)
            assert (np.abs(got - whole.numpy()) <= sizes.numpy() / LEVELS / 1.9 + 1e-7).all()
    with torch.no_grad():
        likeliest = loaded(ids).logits[0].argmax(-1)
    names = {i: words().id_to_token(i) for i in range(words().get_vocab_size())}  # the model has more tokens
    assert [row[0][0] for row in data["expected"]] == [names.get(i, f"token {i}") for i in likeliest.tolist()]


def test_leaving_the_correction_out_is_for_the_page_alone(model: Path) -> None:
    loaded, tokenizer = QEDForCausalLM.from_pretrained(model).eval(), words()
    loaded.set_strength_scale(0.5)
    data = look.collect(loaded, read_text(TEXT, tokenizer), tokenizer, QUIET)
    assert data["expected"] != data["without"]
    assert {block.mixer.strength_scale for block in loaded.model.layers} == {0.5}


def test_a_model_without_a_strength_has_no_difference_and_says_so(tmp_path: Path) -> None:
    for rule in ("gdn2", "eda", "linear"):
        folder = checkpoint(tmp_path / rule, rule=rule)
        result = runner.invoke(app, ["look", str(folder), TEXT, "--out", str(tmp_path / "look.html")])
        assert result.exit_code == 0, result.output
        said = "The layers of this model have no λ: there is no correction of the erase vector to leave out"
        assert said in result.output
        page, data = (tmp_path / "look.html").read_text(), shown(tmp_path / "look.html")
        assert said in unescape(page)
        assert "<title>What every token reads</title>" in page
        assert "lost-map" not in page.partition('id="data"')[0]
        assert {x["lost"] for x in data["heads"]} == {None}
        assert data["without"] is None


def test_softmax_layers_are_left_out_and_named(tmp_path: Path) -> None:
    kinds = ["qed", "full_attention", "gdn2", "sliding_attention"]
    folder = checkpoint(tmp_path / "hybrid", num_hidden_layers=4, layer_types=kinds)
    result = runner.invoke(app, ["look", str(folder), TEXT, "--out", str(tmp_path / "new" / "look.html")])
    assert result.exit_code == 0, result.output
    assert "Layer 2 has no λ" in result.output
    assert "Layers 1 and 3 have softmax attention and no state, and cannot be shown." in result.output
    data = shown(tmp_path / "new" / "look.html")
    assert [x["layer"] for x in data["heads"]] == [0, 0, 2, 2]
    assert [x["lost"] is None for x in data["heads"]] == [False, False, True, True]


def test_words_that_the_tokenizer_does_not_know_are_marked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "look.html"
    result = runner.invoke(app, ["look", str(model), "Remember </script> <b>Zürich</b>", "--out", str(out)])
    assert result.exit_code == 0, result.output
    data = shown(out)
    assert "".join(data["tokens"]) == "Remember </script> <b>Zürich</b>"
    unknown = [data["tokens"][i].strip() for i in data["unknown"]]
    assert unknown == ["</", "script", ">", "<", "b", ">", "Zürich", "</", "b", ">"]
    assert "The tokenizer does not know 10 of the 11 tokens" in result.output


@pytest.mark.parametrize("text", [TEXT, "Zürich 日本 🙂 a", " \n two  spaces\n"])
def test_labels_are_the_text_itself_whatever_the_tokenizer(text: str) -> None:
    for tokenizer in (words(), tokenization.train((document(i) for i in range(50)), 300)):
        read = read_text(text, tokenizer)
        assert read.ids == tokenizer.encode(text, add_special_tokens=False).ids
        own = [label for label in read.labels if label in text]
        assert "".join(own).strip() == text.strip()


def test_a_document_begins_as_in_training() -> None:
    tokenizer = Tokenizer.from_str(words().to_str())
    tokenizer.add_special_tokens(["<s>"])
    read = read_text("Recall kinu", tokenizer)
    assert read.ids[0] == tokenizer.token_to_id("<s>")
    assert read.labels == ["<s>", "Recall", " kinu"]


def test_the_page_is_small_whatever_the_model_and_text(tmp_path: Path) -> None:
    """1,024 tokens of the small recipe's model; larger ones get fewer sources, until a text is refused."""
    sizes = {name: len(layers) for name, layers in (("mini", range(4)), ("small", range(24)), ("medium", range(48)))}
    counts = {name: sources_for(heads, MOST_TOKENS) for name, heads in sizes.items()}
    assert counts["mini"] > counts["small"] > counts["medium"] >= look.LEAST_SOURCES
    with pytest.raises(
        ValueError, match=r"TEXT: expected at most (\d+) tokens, .* with 144 heads, got 1,024"
    ) as caught:
        sources_for(144, MOST_TOKENS)
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert sources_for(144, most) >= look.LEAST_SOURCES
    with pytest.raises(ValueError, match="got"):
        sources_for(144, most + 1)


def test_bytes_are_counted_right(model: Path) -> None:
    """What a head takes on the page is what `bytes_per_token` says, so that the limit is one."""
    ids = torch.tensor([read_text(" ".join([TEXT] * 12), words()).ids])
    _, found = next(iter(look_inside(QEDForCausalLM.from_pretrained(model).eval(), ids)))
    for count in (5, 30):
        packed = head(found, 0, count)
        state = len(packed.pop("state")["values"])
        size = len(json.dumps(packed)) - 1000  # names and numbers that do not grow with the text
        assert state == -(-32 * ids.shape[1] // 3) * 4
        assert size <= bytes_per_token(count) * ids.shape[1] <= size + 2000


@pytest.mark.slow
def test_a_long_text_of_a_small_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small", hidden_size=256, num_hidden_layers=6, num_heads=4, head_dim=64)
    long = " ".join((TEXT.replace(".", " . ").split() * 57)[:MOST_TOKENS])
    assert len(read_text(long, words()).ids) == MOST_TOKENS
    page = write_look(folder, long, tmp_path / "look.html", tokenizer=None, device="cpu", console=QUIET)
    assert page.stat().st_size <= MOST_BYTES


BAD = [
    (("nothing", TEXT), "--tokenizer: expected a file, since there is none in nothing"),
    (("bare", TEXT), "--tokenizer: expected a file, since there is none in bare, got nothing"),
    (("model", ""), "TEXT: expected at least one token, got none in ''"),
    (("model", " \n "), "TEXT: expected at least one token, got none"),
    (("model", "a " * 1025), "TEXT: expected at most 1,024 tokens, which a page can show, got 1,025"),
    (("model", "\udcff"), "TEXT: expected text in UTF-8"),
    (("softmax", TEXT), "CHECKPOINT: expected a model with recurrent layers, got full_attention"),
    (("narrow", TEXT), "--tokenizer: expected at most the model's 8 tokens"),
    (("model", TEXT, "--out", "model"), "--out: expected a file, got the folder model"),
    (("model", TEXT, "--out", "bare/config.json/look.html"), "--out: expected a path below folders"),
    (("model", TEXT, "--device", "tpu"), "--device: expected auto or what is here"),
]


@pytest.fixture(scope="module")
def place(model: Path) -> Path:
    base = model.parent
    shutil.copytree(model, base / "bare")
    (base / "bare" / "tokenizer.json").unlink()
    checkpoint(base / "softmax", layer_types=["full_attention"] * 2)
    checkpoint(base / "narrow", vocab_size=8)
    return base


@pytest.mark.parametrize(("call", "named"), BAD)
def test_what_is_wrong_is_named_and_nothing_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    monkeypatch.setattr("qed.analysis.look.mixer_inputs", None)  # the model is not run
    result = runner.invoke(app, ["look", *call])
    assert result.exit_code == 1, result.output
    assert named in " ".join(result.output.split())
    assert sorted(place.rglob("*")) == before


def test_a_tokenizer_beside_the_checkpoint_will_do(place: Path, tmp_path: Path) -> None:
    given = ["--tokenizer", str(place / "model" / "tokenizer.json"), "--out", str(tmp_path / "look.html")]
    result = runner.invoke(app, ["look", str(place / "bare"), TEXT, *given])
    assert result.exit_code == 0, result.output
    assert shown(tmp_path / "look.html")["heads"]
