"""Training with transformers' Trainer: checkpoints, and a run that resumes from one.

    python examples/trainer.py [FOLDER]

Documents are packed into one row without padding; the model keeps them apart. After 80 steps the second half of the
training is done again, from the checkpoint in its middle, and ends with the same weights. With a FOLDER, checkpoints
and the trained model stay there, and `qed generate FOLDER/model "the lamp is blue. the lamp?"` continues a text.
"""

import sys
import tempfile
from pathlib import Path

import tiny
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from qed import QEDForCausalLM

STEPS = 80
disable_progress_bar()
out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="qed-trainer-"))
words = tiny.make_tokenizer()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<|other|>", pad_token="<|end|>")
data = [{"input_ids": words.encode(text).ids} for text in tiny.documents(tiny.ROWS * STEPS)]


def make_trainer(model: QEDForCausalLM) -> Trainer:
    """Return a Trainer that saves a checkpoint at the middle and at the end."""
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=tiny.ROWS,
        learning_rate=5e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        logging_steps=10,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return Trainer(model, arguments, collate, data, processing_class=tokenizer)


model = tiny.make_model(words)
trainer = make_trainer(model)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]

# A new process would do the same: an untrained model, and the checkpoint to resume from. Weights, optimiser, learning
# rate, the order of the data and random numbers are all in it. (The Trainer says that `lm_head.weight` is missing: it
# is the embedding itself, and is saved once.)
resumed = tiny.make_model(words)
make_trainer(resumed).train(resume_from_checkpoint=str(out / "checkpoints" / f"checkpoint-{STEPS // 2}"))
pairs = list(zip(model.parameters(), resumed.parameters(), strict=True))
difference = max((x - y).abs().max().item() for x, y in pairs)

trainer.save_model(str(out / "model"))
loaded = QEDForCausalLM.from_pretrained(out / "model")
print(f"The loss fell from {losses[0]:.2f} to {losses[-1]:.2f} in {STEPS} steps.")
print(f"The model answers {tiny.accuracy(loaded.eval(), words):.0%} of the questions.")
print(f"Resumed at step {STEPS // 2} and trained to the end, no weight differs by more than {difference:g}.")
print(f"The trained model is in {out / 'model'}.")
