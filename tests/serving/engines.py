"""Small models and vLLM's engines of them, for the tests that need vLLM."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qed import RULES, QEDConfig, QEDForCausalLM

LENGTHS = [*range(1, 41, 2), *range(60, 70), 95, 96, 97, 127, 128, 129, 160, 199, 200, *range(3, 90, 5)]
NEW = 16
# Every rule once; and softmax layers with and without a window, which is shorter than most prompts.
STACKS = {
    "recurrent": list(RULES),
    "hybrid": ["qed", "full_attention", "qed-rand", "sliding_attention", "gdn2"],
}


def checkpoint(folder: Path, stack: str, **changes: Any) -> QEDForCausalLM:
    """Write a model with random weights, so large that its logits are far apart, and return it."""
    torch.manual_seed(0)
    types = STACKS[stack]
    config = QEDConfig.tiny(
        **{
            "num_hidden_layers": len(types),
            "layer_types": types,
            "sliding_window": 40,
            "initializer_range": 0.3,
            "expand_v": 1.5,
            "eos_token_id": None,
            "bos_token_id": None,
            **changes,
        }
    )
    model = QEDForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    """Prompts of mixed length, of which many begin alike."""
    draw = torch.Generator().manual_seed(0)
    beginnings = torch.randint(3, 256, (3, max(LENGTHS)), generator=draw)
    texts = []
    for i, length in enumerate(LENGTHS):
        text = beginnings[i % 3, :length].clone()
        text[-1 - length // 8 :] = torch.randint(3, 256, (1 + length // 8,), generator=draw)
        texts.append(text.tolist())
    return texts


@torch.no_grad()
def greedy(model: QEDForCausalLM, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers' `generate` answers."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return answer[0, len(prompt) :].tolist()


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """A vLLM engine of a checkpoint; in this process, unless there are to be several."""
    from vllm import LLM, envs
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(options.get("tensor_parallel_size", 1) > 1))
    envs.disable_envs_cache()  # an engine in this process remembers the environment that it began with
    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    llm = LLM(
        str(folder),
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 2**28,
            "enable_prefix_caching": False,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, affinity)


def answers(llm: Any, texts: list[list[int]], **sampling: Any) -> list[Any]:
    """vLLM's answers, in the order of the prompts."""
    from vllm import SamplingParams

    chosen = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False, **sampling}
    given = [{"prompt_token_ids": text} for text in texts]
    return llm.generate(given, SamplingParams(**chosen), use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    """The tokens of answers."""
    return [list(output.outputs[0].token_ids) for output in outputs]
