"""An adapter with PEFT: train LoRA matrices on a frozen model, switch them off and on, merge them into the weights.

    python examples/peft_lora.py

`make setup` installs PEFT; elsewhere `pip install '.[peft]'` does.

The model has learned to answer with the newest colour of a thing. The adapter learns to answer with the oldest one, and
nothing of the model itself changes.
"""

import tiny
import torch
from peft import LoraConfig, get_peft_model

STEPS = 60
tokenizer = tiny.make_tokenizer()
base = tiny.trained_model(tokenizer)
rows = tiny.encode(tokenizer, tiny.documents(200, seed=2))
with torch.no_grad():
    base_logits = base(rows).logits

# Without `target_modules`, adapters go to `in_proj`, which makes queries, keys, values and gates, and to `o_proj`,
# which leads back into the residual stream. "all-linear" adds the MLP's `gate_up_proj` and `down_proj`, and others.
adapter = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM")
adapted = get_peft_model(base, adapter)
trained, total = adapted.get_nb_trainable_parameters()
print(f"The adapter has {trained:,} parameters, the model {total - trained:,}.")

before = tiny.accuracy(adapted, tokenizer, "oldest")
oldest = tiny.encode(tokenizer, tiny.documents(tiny.ROWS * STEPS, seed=3, answer="oldest"))
losses = tiny.train(adapted, oldest, steps=STEPS, learning_rate=2e-2)
after = tiny.accuracy(adapted, tokenizer, "oldest")
print(f"The loss on the new text fell from {losses[0]:.2f} to {losses[-1]:.2f}.")
print(f"It answers {before:.0%} of the new questions without the adapter, and {after:.0%} with it.")

with torch.no_grad():
    with adapted.disable_adapter():
        off_logits = adapted(rows).logits
    on_logits = adapted(rows).logits
    merged = adapted.merge_and_unload()  # a plain model again, with no adapter to compute
    merged_logits = merged(rows).logits
print(f"Switched off, the model is what it was: logits differ by {(off_logits - base_logits).abs().max():g}.")
print(f"Merged and unmerged differ by {(merged_logits - on_logits).abs().max():.0e}, by rounding alone.")
