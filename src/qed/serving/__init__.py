"""Serving: what lets other programs' engines run a model of this package.

`vllm.py` is the plugin that vLLM loads by its entry point, `vllm_model.py` the model that vLLM then builds, of this
package's own layers, and `sharding.py` says which part of every weight a process of tensor parallelism has. Importing
this package imports no engine.
"""
