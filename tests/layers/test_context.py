"""One sequence over several processes is the sequence: outputs and gradients, to float64's rounding, and no bit of a
state's path is autocast's."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from qed import QEDConfig, QEDForCausalLM
from qed.layers.context import Context
from qed.ops.affine import Affine

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for rule in ("qed", "qed-rand", "gdn", "deltanet", "eda"):
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig.tiny(rule=rule, initializer_range=0.2)).double().model
    x = torch.randint(0, 256, (2, 24))
    parameters = list(model.parameters())
    whole = model(x, use_cache=False).last_hidden_state
    weights = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = torch.autograd.grad((whole * weights).sum(), parameters)
    for block in model.layers:
        block.mixer.context = Context()
    mine = slice(rank * 24 // world, (rank + 1) * 24 // world)
    part = model(x[:, mine], use_cache=False).last_hidden_state
    assert torch.allclose(part, whole[:, mine], rtol=0, atol=1e-11), rule
    found = torch.autograd.grad((part * weights[:, mine]).sum(), parameters)
    for a, b in zip(found, truth, strict=True):
        dist.all_reduce(a)
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11), rule
torch.manual_seed(rank)
mine = Affine(torch.randn(2, 1, 32, 32) / 6, torch.randn(2, 1, 32, 16))
start = Context().start(mine)
with torch.autocast("cpu", torch.bfloat16):
    assert torch.equal(Context().start(mine), start)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_stretches_are_the_whole(processes: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run([*start, *meet, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
