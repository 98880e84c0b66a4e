"""What others call keeps its arguments: a change here is a change for them, and must be meant."""

import inspect

import pytest

import qed
from qed.layers import Attention, Mixer, short_convolution

DENSE = "sequences=Sequences(lengths=None, order=None, cu_seqlens=None)"
PUBLIC = {
    qed.erase_write: "q k a u g=None | scale=1.0 initial_state=None cu_seqlens=None impl='auto'",
    qed.erase_write_step: "q k a u g=None | state scale=1.0 inplace=False impl='auto'",
    qed.explain: "q k=None a=None u=None g=None",
    qed.ops.explain: "q k a u g=None | scale=1.0 initial_state=None cu_seqlens=None impl='auto'",
    qed.qed_attention: (
        "q k v g b w strength | normalize_qk=True gate=True project=True direction=None scale=1.0 initial_state=None "
        "cu_seqlens=None impl='auto'"
    ),
    qed.QEDForCausalLM.forward: (
        "self input_ids=None attention_mask=None past_key_values=None inputs_embeds=None labels=None use_cache=None "
        "logits_to_keep=0 cu_seqlens=None position_ids=None cu_seq_lens_q=None cu_seq_lens_k=None max_length_q=None "
        "max_length_k=None seq_idx=None num_items_in_batch=None output_hidden_states=None output_attentions=None"
    ),
    qed.QEDForCausalLM.set_strength_scale: "self scale",
    qed.stream: "model input_ids | max_new_tokens sampling=None attention_mask=None together=16",
    qed.Sampling: "| temperature=0.0 top_k=0 top_p=1.0 min_p=0.0 repetition_penalty=1.0",
    Mixer.forward: f"self x state=None {DENSE} | residual=None inplace=False rewind=0 impl=None",
    Attention.forward: f"self x state=None {DENSE} | residual=None rewind=0",
    short_convolution: f"x weight state=None {DENSE} impl='auto'",
}
FIELDS = (
    "vocab_size hidden_size num_hidden_layers num_heads head_dim expand_v intermediate_size rule layer_types "
    "layer_rules lambda_max erase_max theta_init conv_size read_scale output_gate output_gate_rank decay_rank "
    "sliding_window rope_theta initializer initializer_range tie_word_embeddings norm_eps use_cache bos_token_id "
    "eos_token_id pad_token_id format_version"
)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_arguments(function: object) -> None:
    words = []
    for name, x in inspect.signature(function).parameters.items():
        if x.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if x.kind is inspect.Parameter.KEYWORD_ONLY and "|" not in words:
            words.append("|")
        words.append(name if x.default is inspect.Parameter.empty else f"{name}={x.default!r}")
    assert " ".join(words) == PUBLIC[function]


def test_fields_of_the_configuration() -> None:
    saved = set(qed.QEDConfig().to_dict())
    assert set(FIELDS.split()) <= saved
    assert set(qed.QEDConfig.__annotations__) == set(FIELDS.split())
