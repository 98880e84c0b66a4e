"""Our model as a language model of lm-eval, which asks three kinds of questions.

| request | answer | how it is found |
|---|---|---|
| loglikelihood | how likely a continuation is after a context, and whether it is the likeliest | `eval/scoring.py` |
| loglikelihood_rolling | how likely a whole text is, in windows of at most `max_length` tokens | `eval/scoring.py` |
| generate_until | what the model says after a text | `eval/answers.py` |

Tokens are those of `lm_eval --model hf` with the same tokenizer, and so are the answers, but for rounding. As
everywhere else here, `bos` puts the tokenizer's <s> before a text, where it has one.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ...data import tokenization
from ...data.tokenizer_files import as_transformers
from ...model.base import weights_dtype
from ...model.loading import load
from ..answers import answers
from ..scoring import Text, scores
from .journal import Journal

UNLIMITED = 2**30  # tokens: a recurrent state has no longest text
Arguments = list[tuple[Any, ...]]
Found = Iterable[tuple[int, Any]]  # the number of a request, and the answer to it


class Answering:
    """The three kinds of answers; the rest of an `LM` is lm-eval's own `HFLM`."""

    model: Any
    tokenizer: Any
    batch_size: int
    max_length: int
    max_gen_toks: int
    eot_token_id: int
    prefix_token_id: int
    bos: bool
    journal: Journal

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The logarithm of every continuation's probability, and whether it is what greedy decoding gives."""
        found = self._answered("loglikelihood", [x.args for x in requests], self._continuations)
        return [(float(x), bool(greedy)) for x, greedy in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The logarithm of every text's probability."""
        return self._answered("loglikelihood_rolling", [x.args for x in requests], self._whole_texts)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model says after every text, without what ends it."""
        from lm_eval.models.utils import normalize_gen_kwargs

        asked = [x.args for x in requests]
        if any(normalize_gen_kwargs(kwargs, self.max_gen_toks)["do_sample"] for _, kwargs in asked):
            return list(super().generate_until(requests, disable_tqdm=disable_tqdm))  # type: ignore[misc]
        return self._answered("generate_until", asked, self._generated)

    def _answered(self, kind: str, asked: Arguments, find: Callable[[Arguments, set[int]], Found]) -> list[Any]:
        """The answers of the journal, and those that are missing, which are kept there as they come."""
        known = self.journal.known(kind, asked)
        missing = set(range(len(asked))) - known.keys()
        for index, answer in find(asked, missing) if missing else ():
            known[index] = answer
            self.journal.add(kind, index, asked[index], answer)
        return [known[i] for i in range(len(asked))]

    def _continuations(self, asked: Arguments, missing: set[int]) -> Found:
        texts = []
        for (_, text), (context, continuation) in zip(asked, self._pairs(asked), strict=True):
            if not continuation:
                raise ValueError(f"--tokenizer: expected one in which {text!r} has tokens of its own, got none")
            ids = (context + continuation)[-(self.max_length + 1) :]
            texts.append(Text(ids, len(ids) - len(continuation)))
        for i, found in scores(self.model, texts, batch=self.batch_size, wanted=missing):
            yield i, [float(found.log_probability.sum()), bool(found.likeliest.all())]

    def _pairs(self, asked: Arguments) -> Iterator[tuple[list[int], list[int]]]:
        """Tokens of contexts and continuations: those of both together, cut where the context's own end."""
        contexts, wholes = [], []
        for context, continuation in asked:
            stripped = context.rstrip()
            contexts.append(stripped)
            wholes.append(context + continuation)
        ids = self._encoded([*contexts, *wholes])
        for text, context, whole in zip(contexts, ids[: len(asked)], ids[len(asked) :], strict=True):
            if text:
                yield context, whole[len(context) :]
            else:  # something has to stand before the first token
                whole = whole[1:] if whole[:1] == [self.prefix_token_id] else whole
                yield [self.prefix_token_id], whole

    def _whole_texts(self, asked: Arguments, missing: set[int]) -> Found:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        texts: list[Text] = []
        owners: list[int] = []
        for i, ids in enumerate(self._encoded([text for (text,) in asked], bos=False)):
            windows = get_rolling_token_windows(ids, self.prefix_token_id, min(self.max_length, max(len(ids), 1)), 1)
            for context, wanted in map(make_disjoint_window, windows):
                texts.append(Text(context + wanted, len(context)))
                owners.append(i)
        total: dict[int, float] = defaultdict(float)
        counts = Counter(owners)
        left = {i: counts[i] for i in missing}
        yield from ((i, 0.0) for i, count in left.items() if count == 0)
        wanted_texts = {number for number, i in enumerate(owners) if i in missing}
        for number, found in scores(self.model, texts, batch=self.batch_size, wanted=wanted_texts):
            i = owners[number]
            total[i] += float(found.log_probability.double().sum())
            left[i] -= 1
            if left[i] == 0:
                yield i, total[i]

    def _generated(self, asked: Arguments, missing: set[int]) -> Found:
        """Greedy answers; prompts with the same settings are batched by length, and so alike when a run is resumed."""
        from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

        ids = self._encoded([text for text, _ in asked])
        alike = defaultdict(list)
        for i, (_, kwargs) in enumerate(asked):
            alike[json.dumps(kwargs, sort_keys=True)].append(i)
        for same in alike.values():
            settings = normalize_gen_kwargs(asked[same[0]][1], self.max_gen_toks)
            stops = [x for x in settings["until"] if x]
            if (room := self.max_length - settings["max_gen_toks"]) < 1:
                new = settings["max_gen_toks"]
                raise ValueError(f"--max-length: expected more than {new} new tokens, got {self.max_length}")
            same.sort(key=lambda i: (len(ids[i]), i))
            for batch in (same[n : n + self.batch_size] for n in range(0, len(same), self.batch_size)):
                if not missing.intersection(batch):
                    continue
                said = answers(
                    self.model,
                    [ids[i][-room:] for i in batch],
                    new_tokens=settings["max_gen_toks"],
                    ends={self.eot_token_id} | self.model.end_tokens(),
                    batch=self.batch_size,
                    finished=partial(self._has_stop, stops) if stops else None,
                )
                for i, answer in zip(batch, said, strict=True):
                    text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                    if i in missing:
                        yield i, postprocess_generated_text(text, stops, None)

    def _has_stop(self, stops: list[str], row: list[int]) -> bool:
        text = self.tokenizer.decode(row)
        return any(stop in text for stop in stops)

    def _encoded(self, texts: list[str], bos: bool | None = None) -> list[list[int]]:
        """Tokens of texts, found on all cores, with the tokenizer's <s> before them if there is to be one."""
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        begins = self.bos if bos is None else bos
        return [[self.tokenizer.bos_token_id, *ids] for ids in found] if begins else found


@lru_cache
def harness_model() -> Any:
    """The class of our models in lm-eval, registered there as "qed"."""
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(f"--harness: lm-eval is not installed: {error}", name="lm_eval") from error

    class QEDLM(Answering, HFLM):  # type: ignore[misc]
        def __init__(
            self,
            pretrained: Any,
            strength: float = 1.0,
            device: str = "cpu",
            tokenizer: Any = None,
            bos: bool = False,
            **options: Any,
        ):
            """Args: pretrained, a model or the folder of one, whose tokenizer is then read too; others by name."""
            model = pretrained
            if isinstance(pretrained, str):
                model = load(Path(pretrained), dtype=weights_dtype(device), device=device)
                model.set_strength_scale(float(strength))
                tokenizer = tokenization.load(str(Path(pretrained) / "tokenizer.json"))
            self.bos, self.journal = bos and tokenization.ends(tokenizer)[0] is not None, Journal()
            words = as_transformers(tokenizer)
            super().__init__(pretrained=model, tokenizer=words, **({"max_length": UNLIMITED} | options))

    return register_model("qed")(QEDLM)
