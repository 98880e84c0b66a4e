"""A rule with a gate of its own is two files: the table of rules and the layer. Kernels that do not know it say so."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qed

# Lines, and what is added behind each: a gate m that multiplies the erase vector.
RULES = {
    "    strength: Tensor | float | None = None  # λ": "    m: Tensor | None = None",
    "    substeps: int = 1": '    multiplier: Width = "none"',
    "            a = x.b * x.k": "        if x.m is not None:\n            a = x.m * a",
    '        _expect("w", x.w, [write])': '        _expect("m", x.m, [widths[self.multiplier]])',
    "RULES: dict[str, Rule] = {": '    "new": Rule(erase_vector="m⊙b⊙k", multiplier="channel"),',
}
MIXER = {
    "    strength: Tensor | None": "    m: Tensor | None = None",
    '        self.parts |= {"e": keys': '        self.parts |= {"m": width(self.row.multiplier, keys)}',
    "    def _projections(self": "        m = gates.m",
    "            strength=strength,": "            m=None if m is None else heads(torch.sigmoid(m)),",
}
# Lines that change.
GATES = (
    "return Gates(b, w, f, e, self.strength() if self.row.strength else None)",
    """m = inputs["m"] if self.parts["m"] else None
        return Gates(b, w, f, e, self.strength() if self.row.strength else None, m)""",
)
UNPACKED = "(b, w, f, e, strength) = self._heads, gates", "(b, w, f, e, strength) = self._heads, gates[:5]"
CHECK = """
import torch
from qed import RULES, QEDConfig, QEDForCausalLM
from qed.layers.obstacles import rule_obstacle
from qed.model.decoding import stream
torch.manual_seed(0)
model = QEDForCausalLM(QEDConfig.tiny(rule="new", initializer_range=0.3)).double().eval()
mixer, x = model.model.layers[0].mixer, torch.randn(2, 9, 64, dtype=torch.float64)
projections = mixer.projections(x[..., : model.config.hidden_size])
operands = mixer.row.operands(projections)
assert torch.allclose(operands.a, projections.m * projections.b * projections.k)
ids = torch.randint(3, 256, (2, 9))
text = torch.cat([ids, *stream(model, ids, max_new_tokens=6)], 1)
assert torch.equal(model(text[:, :-1]).logits[:, 8:].argmax(-1), text[:, 9:])
assert rule_obstacle(RULES["new"]) == "the kernels do not know the rule's multiplier = 'channel'"
assert rule_obstacle(RULES["gdn2"]) is None and rule_obstacle(RULES["qed"]) is None
model.set_impl("auto", operands="triton")
try:
    model.float()(ids)
except RuntimeError as error:
    assert "cannot run here: operands: the kernels do not know" in str(error)
else:
    raise AssertionError("a gate was ignored")
print("right")
"""


def add(path: Path, additions: dict[str, str]) -> None:
    lines = path.read_text().splitlines()
    for start, addition in additions.items():
        (at,) = [i for i, line in enumerate(lines) if line.startswith(start)]
        lines.insert(at + 1, addition)
    path.write_text("\n".join(lines) + "\n")


def change(path: Path, old: str, new: str) -> None:
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.slow
def test_a_gate_is_two_files(tmp_path: Path) -> None:
    source = tmp_path / "src" / "qed"
    shutil.copytree(Path(qed.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__"))
    mixer = source / "layers" / "mixer.py"
    add(source / "rules.py", RULES)
    add(mixer, MIXER)
    change(mixer, *GATES)
    change(mixer, *UNPACKED)
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-3000:]
