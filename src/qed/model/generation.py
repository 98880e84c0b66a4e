"""What transformers' `generate` has to know of this model: its inputs for every step, and its cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ..layers.sequences import padding_first
from ..routes import AUTO, REFERENCE, Call
from .arguments import mask_of
from .cache import QEDCache, check_cache
from .generating import Ends
from .routes import GENERATE, generation_asked

LOOKBEHIND = 32  # tokens before its last draft that an assistant may have to read again


class QEDGenerationMixin(GenerationMixin):
    """transformers' generation with our cache."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: QEDCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers. From the second step on, `generate` itself has made the token of every row and has added
        a column of ones to the mask for it: the mask says nothing then, and without it the step can be the captured
        one. Padding behind a prompt's tokens is read before them. All calls of a `generate` take the decoder of the
        first that asks for one (`Decoders.look`).

        Args:
            input_ids, past_key_values, attention_mask, inputs_embeds: as `forward` takes them.
            next_sequence_length: how many of the tokens are new.
            is_first_iteration: whether the prompt itself is read.
            kwargs: passed on.
        """
        if isinstance(past_key_values, QEDCache):
            past_key_values.generating = True
            if past_key_values.known:  # transformers would give all drafts together with the whole text
                next_sequence_length, past_key_values.known = input_ids.shape[1] - past_key_values.known, 0
            if next_sequence_length is not None:
                _check_unread(past_key_values, next_sequence_length)
            # A prompt that is read in pieces comes without `next_sequence_length`, and its mask is the caller's.
            if next_sequence_length == 1 and not is_first_iteration and past_key_values.is_initialized:
                attention_mask = None
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        name = "input_ids" if inputs["input_ids"] is not None else "inputs_embeds"
        if inputs[name].shape[1] == 0:
            raise ValueError(f"{name}: expected at least one token to go on from")
        if attention_mask is not None:  # the logits that choose the next token are those of the last column
            mask = mask_of(inputs[name], attention_mask, past_key_values)
            inputs[name], inputs["attention_mask"] = padding_first(inputs[name], mask)
        return inputs

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *given: Any, **options: Any
    ) -> Any:
        """As in transformers. Padding behind the tokens of a prompt that is read in pieces goes before all of them
        here, since `prepare_inputs_for_generation` sees one piece at a time.

        Args:
            input_ids, generation_config, model_kwargs, given, options: as transformers has prepared them.
        """
        mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
        if generation_config.prefill_chunk_size is not None and isinstance(cache, QEDCache):
            known = _tokens_known(cache, input_ids, mask, generation_config)
            if mask is not None:
                new, now = padding_first(input_ids[:, known:], mask_of(input_ids[:, known:], mask, cache))
                model_kwargs["attention_mask"] = torch.cat([mask[:, : mask.shape[1] - now.shape[1]], now], 1)
                input_ids = torch.cat([input_ids[:, :known], new], 1)
        found = super()._prefill(input_ids, generation_config, model_kwargs, *given, **options)
        model_kwargs["attention_mask"] = mask
        return found

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *_: Any
    ) -> None:
        """Make the cache, or check the one that was given, before anything runs.

        In assisted generation the model reads candidates, and its cache then forgets those that were rejected. The
        model's own cache learns from `logits_to_keep` how many there are. That of an assistant, which drafts them one
        by one, is told here how many it will draft.
        """
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "cache_implementation: the states of this model are in a cache of its own, QEDCache; "
                f"expected None, got {generation_config.cache_implementation!r}"
            )
        cache = check_cache(model_kwargs.get("past_key_values"))
        if cache is not None:
            cache.given, cache.checked, cache.known = True, None, 0
        if not generation_config.use_cache:
            if cache is not None and cache.is_initialized:
                raise ValueError(
                    "past_key_values: with use_cache=False every step reads the whole text from its beginning; "
                    f"expected None, got {cache!r}"
                )
            return
        rewind = 1 if generation_mode == GenerationMode.ASSISTED_GENERATION else 0
        if generation_config.is_assistant:
            rewind = (generation_config.max_new_tokens or 0) + LOOKBEHIND
        if cache is None:
            model_kwargs["past_key_values"] = QEDCache(rewind=rewind)
        elif generation_config.is_assistant and cache.rewind:
            cache.rewind = max(cache.rewind, rewind)

    def _assisted_decoding(self, input_ids: Tensor, *, generation_config: Any, **options: Any) -> Any:
        """As in transformers, whose first call reads the whole text, except that what a given cache has read is left
        out of it (`prepare_inputs_for_generation`).

        Args:
            input_ids: the prompt [1, T], with the tokens that the cache has read or without them.
            generation_config, options: as transformers has prepared them.
        """
        cache = options.get("past_key_values")
        if isinstance(cache, QEDCache):
            cache.known = _tokens_known(cache, input_ids, options.get("attention_mask"), generation_config)
        return super()._assisted_decoding(input_ids, generation_config=generation_config, **options)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate with one beam, greedily or by sampling: captured where that can be (`routes.GENERATE`), otherwise as
        transformers does. The results are the same.

        Args:
            input_ids: the prompts [B, T].
            logits_processor, stopping_criteria, generation_config: as transformers has prepared them.
            synced_gpus: whether several processes have to take the same number of steps.
            streamer: what gets the tokens as they come.
            model_kwargs: what else `forward` takes.
        """
        plain = {
            "processes in step (synced_gpus)": synced_gpus,
            "an assistant's drafts": generation_config.is_assistant,
        }
        places: dict[str, Any] = {"batch": input_ids.shape[0], "cache": model_kwargs.get("past_key_values")}
        model: Any = self
        asked = generation_asked(model, generation_config, logits_processor, **places, **plain)
        route = GENERATE.pick(AUTO, Call.of(input_ids, *input_ids.shape), asked)
        if route.name == REFERENCE:
            given = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
            return route.run(self, *given, **model_kwargs)
        outputs = self._prefill(input_ids, generation_config, model_kwargs)
        ends = Ends(stopping_criteria, generation_config._pad_token_tensor, input_ids.shape[0])
        options = {"chooser": asked.chooser, "text": input_ids, "ends": ends, "streamer": streamer}
        return route.run(asked.decoder, outputs.past_key_values, outputs.logits[:, -1], **options)

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse transformers' continuous batching, whose paged cache has keys and values alone."""
        raise NotImplementedError(
            "continuous batching: transformers' paged cache has no place for recurrent states; "
            "use `generate` with a padded batch, or vLLM with this package's plugin"
        )


def _check_unread(cache: QEDCache, tokens: int) -> None:
    """Raise ValueError unless there are tokens of the prompt that a cache has not read."""
    if tokens < 1 and cache.tokens:
        raise ValueError(
            "past_key_values: expected a cache that has not read the prompt's last token, since the logits after it "
            f"are not kept, got {cache!r}; keep a `cache.copy()` from before that token"
        )


def _tokens_known(cache: QEDCache, input_ids: Tensor, mask: Tensor | None, generation_config: Any) -> int:
    """Return how many of a prompt's tokens its cache has read; 0 if those are not given. As in transformers, the mask
    says whether they are, or the length that transformers has kept of a mask without padding."""
    length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    if length != input_ids.shape[1]:
        return 0
    _check_unread(cache, length - cache.tokens)
    return cache.tokens
