"""The model card that every saved model has, and whose card it is."""

from pathlib import Path

import pytest
import yaml

from qed import QEDConfig, QEDForCausalLM, QEDModel
from qed.model.card import CARD, is_ours


def test_a_card_says_what_the_model_is(tmp_path: Path) -> None:
    types = ["qed", "sliding_attention", "qed", "gdn2"]
    model = QEDForCausalLM(QEDConfig.tiny(num_hidden_layers=4, layer_types=types, lambda_max=0.5))
    model.save_pretrained(tmp_path)
    _, head, text = (tmp_path / CARD).read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["library_name"] == "transformers"
    assert about["pipeline_tag"] == "text-generation"
    assert about["tags"] == ["linear-attention", "gdn2", "qed"]
    assert "license" not in about  # nobody has said it
    assert "| layers | 4: 2 qed, 1 sliding_attention, 1 gdn2 |" in text
    assert f"| parameters | {sum(x.numel() for x in model.parameters()):,} |" in text
    assert "at most 0.5" in text


def test_only_cards_of_ours_that_nobody_edited_are_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = QEDForCausalLM(QEDConfig.tiny())
    model.save_pretrained(tmp_path)
    path = tmp_path / CARD
    first = path.read_text()
    QEDForCausalLM(QEDConfig.tiny(rule="gdn2")).save_pretrained(tmp_path)
    assert "1 gdn2" not in first
    assert "2 gdn2" in path.read_text()
    for theirs in (first.replace("parameters", "weights", 1), first + "More.\n", "A card.\n", "", b"\xff\xfe"):
        path.write_bytes(theirs if isinstance(theirs, bytes) else theirs.encode())
        before = path.read_bytes()
        assert not is_ours(path)
        model.save_pretrained(tmp_path)
        assert path.read_bytes() == before
    path.unlink()
    model.save_pretrained(tmp_path)
    assert path.read_text() == first


def test_a_model_without_a_head_has_no_card(tmp_path: Path) -> None:
    QEDModel(QEDConfig.tiny()).save_pretrained(tmp_path)
    assert not (tmp_path / CARD).exists()
