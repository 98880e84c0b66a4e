"""A look inside: what a token reads from every earlier one, and what the query made the layer forget.

    python examples/look_inside.py

A recurrent layer never writes down an attention matrix, but there is one, A, with o_t = Σ_s A[t, s] u_s exactly.
`look_inside` computes it, and the same on the same activations with λ = 0. Their difference is what the second erase
direction took away. `qed look` makes a page of it for a model of any size.
"""

import tiny
import torch

from qed.analysis.look import look_inside

tokenizer = tiny.make_tokenizer()
model = tiny.trained_model(tokenizer)
text = "the lamp is blue. the door is red. the lamp is green. the lamp?"
ids = tiny.encode(tokenizer, [text])
with torch.no_grad():
    answer = tokenizer.decode([int(model(ids).logits[0, -1].argmax())])
print(f"{text} {answer}\n")

# Of all layers and heads, the one whose last token had its reads changed most by the correction.
looks = dict(look_inside(model, ids))
changes = {(i, h): look.forgotten[0, h, -1].norm() for i, look in looks.items() for h in range(look.attention.shape[1])}
layer, head = max(changes, key=lambda place: changes[place])
look = looks[layer]
strength = model.model.layers[layer].mixer.strength()[head].item()
print(f"Layer {layer}, head {head}, λ = {strength:.3f}: what the last token reads of every token up to it.\n")
print(f"{'token':>8}  {'read':>8}  {'with λ = 0':>10}  {'forgotten':>10}")
read, without, forgotten = (x[0, head, -1] for x in (look.attention, look.without_correction, look.forgotten))
tokens = tokenizer.encode(text).tokens
for s, token in enumerate(tokens):
    print(f"{token:>8}  {read[s]:8.4f}  {without[s]:10.4f}  {forgotten[s]:10.4f}")

most = int(forgotten.abs().argmax())
share = (forgotten.norm() / without.norm()).item()
print(f"\nThe query changed most what is read of {tokens[most]!r}, token {most}: by {forgotten[most].abs():.4f}.")
print(f"In all it changed {share:.1%} of what this token reads, by the norm of A's row.")
