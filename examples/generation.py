"""Generation: greedy, sampled, in a padded batch, streamed, and continued from a cache.

    python examples/generation.py

A checkpoint of your own is `QEDForCausalLM.from_pretrained(folder)`; here a tiny model is trained first.
"""

import tiny
import torch

from qed import Sampling, stream

tokenizer = tiny.make_tokenizer()
model = tiny.trained_model(tokenizer)
facts = "the lamp is blue. the door is red. the lamp is green."


def ids(text: str) -> torch.Tensor:
    """Return the tokens of a text, [1, tokens]."""
    return tiny.encode(tokenizer, [text])


# Greedy generation takes the likeliest token. `generate` is transformers' own, with all of its options.
prompt = ids(f"{facts} the lamp?")
greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2)
print("Greedy:   ", tokenizer.decode(greedy[0].tolist()))

# Sampling draws tokens by their probability, here three continuations of one prompt.
torch.manual_seed(0)
open_prompt = ids(f"{facts} the")
options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "num_return_sequences": 3, "max_new_tokens": 4}
sampled = model.generate(open_prompt, attention_mask=torch.ones_like(open_prompt), **options)
for row in sampled:
    print("Sampled:  ", tokenizer.decode(row[open_prompt.shape[1] :].tolist()))

# Prompts of different lengths make one batch with padding on the left. Padding changes no state, so every prompt is
# answered as if it were alone.
questions = [f"{facts} the lamp?", "the hat is pink. the hat?"]
encoded = [tokenizer.encode(text).ids for text in questions]
longest = max(map(len, encoded))
batch = torch.tensor([[0] * (longest - len(x)) + x for x in encoded])
mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in encoded])
answers = model.generate(batch, attention_mask=mask, max_new_tokens=1)[:, -1]
print("In a batch:", tokenizer.decode(answers.tolist()))

# `stream` yields tokens as they come, and decides nothing about where a text ends: stop whenever you want to.
print("Streamed:  ", end="", flush=True)
streamed: list[int] = []
for part in stream(model, prompt, max_new_tokens=12, sampling=Sampling(temperature=0.0)):
    streamed += part[0].tolist()
    print(tokenizer.decode(part[0].tolist()), end=" ", flush=True)
print()

# A cache holds the states after a text. They have a fixed size, whatever was read, so it costs little to keep one and
# to continue from a copy as often as there are questions: the facts are read once.
with torch.no_grad():
    cache = model(ids(facts), use_cache=True).past_key_values
continued = {}
for thing in ("lamp", "door"):
    question = ids(f"{facts} the {thing}?")
    full = torch.ones_like(question)
    continued[thing] = model.generate(question, attention_mask=full, past_key_values=cache.copy(), max_new_tokens=1)
    print(f"Continued: the {thing}? {tokenizer.decode(continued[thing][0, -1:].tolist())}")

size = sum(x.numel() * x.element_size() for i in cache.states for x in cache.get(i))
print(f"The cache of {cache.get_seq_length()} tokens takes {size:,} bytes, and would take as many after a million.")
