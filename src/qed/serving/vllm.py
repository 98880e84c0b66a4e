"""The plugin for vLLM: it registers the model with vLLM, and refuses at the start what the model cannot do there.

vLLM finds `register` by the entry point "vllm.general_plugins" of this package, and calls it in each of its processes.
With that `vllm serve CHECKPOINT` runs any checkpoint of this package. `vllm_model.py` is the model.
"""

from __future__ import annotations

from typing import Any

from .sharding import check_processes

ARCHITECTURE = "QEDForCausalLM"


class ServingConfig:
    """What vLLM asks a model of its own configuration before anything else is done."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing of the model's configuration has to be changed."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError for what the model cannot do under vLLM, and set what it needs."""
        for what, given, why in _refused(vllm_config):
            if given:
                raise ValueError(f"{what}: QED under vLLM expects none, got {given!r}: {why}")
        config = vllm_config.model_config.hf_config
        check_processes(config, vllm_config.parallel_config.tensor_parallel_size)
        # vLLM gives a window that stands in a configuration to every softmax layer; here only some layers have it.
        vllm_config.cache_config.sliding_window = None
        # A step waits for the device and decides by what it sees, so it must not be captured.
        vllm_config.compilation_config.cudagraph_mode = _no_cuda_graphs()


def _refused(vllm_config: Any) -> list[tuple[str, Any, str]]:
    """What the plugin lacks: the option's name, what was asked for, and why it is refused."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    pipeline, context = parallel.pipeline_parallel_size, parallel.decode_context_parallel_size
    return [
        (
            "speculative_config",
            None if speculative is None else speculative.method,
            "a recurrent state cannot go back by the tokens that were guessed wrong",
        ),
        ("pipeline_parallel_size", pipeline if pipeline > 1 else None, "a stack is not cut into stages"),
        ("decode_context_parallel_size", context if context > 1 else None, "a state is not cut along its tokens"),
        ("enable_lora", vllm_config.lora_config is not None, "merge the adapter into the weights before serving"),
        ("quantization", vllm_config.model_config.quantization, "the layers are not vLLM's own"),
    ]


def _no_cuda_graphs() -> Any:
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.NONE


def register() -> None:
    """Make the model known to vLLM and, by importing this package, to transformers. It may be called repeatedly."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "qed.serving.vllm_model:QEDForVLLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = ServingConfig
