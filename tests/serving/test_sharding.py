"""Tensor parallelism, without any processes: the parts of a block that several processes have add up to the block."""

import pytest
import torch

from qed import RULES, QEDConfig
from qed.layers import QEDBlock, Sequences
from qed.model.causal_lm import make_block
from qed.serving.sharding import Shards, check_processes, config_of_process

SIZES = {"hidden_size": 24, "num_heads": 4, "head_dim": 8, "intermediate_size": 20, "num_hidden_layers": 1}
VARIANTS = {
    **{rule: {"rule": rule, "expand_v": 1.5} for rule in RULES},
    "a full output gate": {"rule": "qed", "output_gate_rank": 0},
    "no output gate": {"rule": "qed", "output_gate": None},
    "wide bottlenecks": {"rule": "qed", "decay_rank": 32, "output_gate_rank": 32},
    "softmax attention": {"layer_types": ["full_attention"]},
}


def block_of(config: QEDConfig) -> QEDBlock:
    torch.manual_seed(0)
    block = make_block(config, 0).double()
    for weight in block.state_dict().values():
        weight.normal_(0, 0.3)
    return block


@torch.no_grad()
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_block_add_up_to_the_block(variant: str, processes: int) -> None:
    """Both of its halves, and with them every weight: what a process lacks, another one has."""
    config = QEDConfig(**SIZES, **VARIANTS[variant])
    whole, x = block_of(config), torch.randn(1, 11, 24, dtype=torch.float64)
    sequences = Sequences(cu_seqlens=torch.tensor([0, 4, 11]))
    mixed, grown = torch.zeros_like(x), torch.zeros_like(x)
    for rank in range(processes):
        shards = Shards(config, 0, rank=rank, processes=processes)
        own = make_block(config_of_process(config, processes), 0).double()
        assert own.mixer.num_heads == 4 // processes
        own.load_state_dict({name: shards.of(name, weight) for name, weight in whole.state_dict().items()})
        mixed += own.mixer(x, sequences=sequences)[0]
        grown += own.mlp(x)
    torch.testing.assert_close(mixed, whole.mixer(x, sequences=sequences)[0])
    torch.testing.assert_close(grown, whole.mlp(x))


@pytest.mark.parametrize(("field", "processes"), [("num_heads", 8), ("num_heads", 3), ("intermediate_size", 4)])
def test_what_cannot_be_divided_is_refused(field: str, processes: int) -> None:
    config = QEDConfig.tiny(num_heads=4, intermediate_size=126)
    with pytest.raises(ValueError, match=f"a divisor of {field}, which is .*, got {processes}"):
        check_processes(config, processes)


def test_a_weight_of_another_shape_is_refused_by_name() -> None:
    shards = Shards(QEDConfig.tiny(), 0, rank=0, processes=2)
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight: expected shape \[64, 128\], got \[64, 64\]"):
        shards.of("mlp.down_proj.weight", torch.zeros(64, 64))
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight: not a weight of this layer"):
        shards.of("mlp.up_proj.weight", torch.zeros(64, 64))
