"""`qed bench`: what it measures at a size a CPU can do, and that it refuses to time a wrong result."""

import io
import json
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed import QEDConfig, QEDForCausalLM
from qed.bench import growth, made_up
from qed.bench.growth_figure import table
from qed.bench.measuring import Bench
from qed.bench.model import decay_faster
from qed.bench.ops import Shape
from qed.bench.softmax import SoftmaxStep
from qed.bench.train import idle, transformer
from qed.bench.tune import KERNELS, ask, tune
from qed.cli import app
from qed.data import tokenization
from qed.data.synthetic import documents
from qed.eval import scoring
from qed.eval.harness.suites import SUITES
from qed.kernels.recurrence.settings import use_settings
from qed.model.config import SIZES as SIZES_OF_MODELS
from qed.ops import operators

SIZES = {"batch": 2, "tokens": 64, "heads": 1, "width": 16, "rounds": 2}
SMALL = ["bench", "ops", "--device", "cpu", *(word for name, x in SIZES.items() for word in (f"--{name}", str(x)))]


def test_measures_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ops.json"
    result = CliRunner().invoke(app, [*SMALL, "--out", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["form"] == "chunkwise"
    assert set(report["candidates"]) == {"qed, op", "qed, op, strong decay", "gdn2, op", "qed, operator"}
    for row in (*report["candidates"].values(), *report["lengths"].values()):
        times = row["forward_backward_ms"]
        assert 0 < times["lower_quartile"] <= times["median"] <= times["upper_quartile"]
    assert set(report["lengths"]) == {"64", "128"}
    assert [x.name for x in file.parent.iterdir()] == ["ops.json"]
    assert max(report["errors"].values()) < 6e-3


def test_a_wrong_form_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = operators.SequenceOperator.__call__

    def wrong(self: Any, x: Any, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = plain(self, x, save)
        return o * (1.02 if o.dtype == torch.bfloat16 else 1), state

    monkeypatch.setattr(operators.SequenceOperator, "__call__", wrong)
    file = tmp_path / "ops.json"
    result = CliRunner().invoke(app, [*SMALL, "--out", str(file)])
    assert result.exit_code == 1
    assert "correctness gate" in result.output
    assert not file.exists()


def test_another_peer_is_refused() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--against", "flash"])
    assert result.exit_code == 1
    assert "--against: expected one of fla, nothing, got 'flash'" in result.output


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["bench", "--tune", "--out", str(tmp_path / "settings.json")])
    assert result.exit_code == 1
    assert "--tune: expected a CUDA device, got cpu" in result.output
    assert not (tmp_path / "settings.json").exists()


@pytest.mark.parametrize(
    ("text", "width", "message"), [("{}", 64, "settings: expected a file of `qed bench --tune`"), ("", 512, "--width")]
)
def test_tuning_refuses_before_it_works(
    text: str, width: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that it could not add to, and heads that the kernels do not take."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("qed.bench.tune.ask", lambda *_: pytest.fail("it has begun"))
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        tune(Bench(console=Console(quiet=True), out=file, device="cuda"), Shape(width=width))


def test_tuning_keeps_what_wins_by_more_than_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only among what compiles and is right, and beside what was found for other widths."""

    def answer(way: str, task: dict[str, Any]) -> dict[str, Any]:
        kernel, change = task["kernel"], next(iter(task["settings"].values()), {})
        if way == "compile":
            return {"spilled": 1000} if change.get("BK") == 32 else {"spilled": 0}
        if change.get("num_warps") == 8:
            return {"failed": "dq is off by 1.0e-01"}
        wins = {"chunk_terms": 9.8, "chunk_gradients, cut": 8.0}
        assert change.get("BK") != 32  # it spills
        return {"ms": wins.get(kernel, 10.0) if change.get("BK") == 16 else 10.0, "error": 0.0}

    monkeypatch.setattr("qed.bench.tune.ask", lambda way, tasks, *_: [answer(way, task) for task in tasks])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("qed.bench.measuring.environment", lambda device: {})
    file = tmp_path / "settings.json"
    file.write_text('{"settings": {"chunk_terms @ 64x64": {"BK": 16}, "chunk_terms @ 128x128": {"BK": 16}}}')
    report = tune(Bench(console=Console(quiet=True), out=file, device="cuda"), Shape())
    assert report["settings"] == {
        "chunk_terms @ 64x64": {"BK": 16},
        "chunk_gradients, cut @ 128x128": {"BK": 16, "num_warps": 4},
    }
    assert json.loads(file.read_text())["settings"] == report["settings"]


def test_a_process_that_goes_down_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate that took it down has no result, and those after it have theirs."""

    def run(command: list[str], input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        tasks = [task["kernel"] for task in json.loads(input)["tasks"]]
        good = tasks[: tasks.index("bad")] if "bad" in tasks else tasks
        lines = "".join(json.dumps({"ms": int(x)}) + "\n" for x in good)
        return subprocess.CompletedProcess(command, 1, lines, "Traceback\nillegal access\n")

    monkeypatch.setattr("subprocess.run", run)
    tasks = [{"kernel": x, "settings": {}} for x in ("1", "bad", "2", "3")]
    assert ask("measure", tasks, Shape(), "cuda") == [{"ms": 1}, {"failed": "illegal access"}, {"ms": 2}, {"ms": 3}]


def test_an_error_of_the_gpu_is_the_answer_of_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends, since nothing that it would compute can be trusted, and the next one goes on."""
    from qed.bench import tune_process

    def work(task: dict[str, Any]) -> dict[str, Any]:
        if task["kernel"] == "bad":
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with `TORCH_USE_CUDA_DSA`")
        return {"ms": 1}

    def run(command: list[str], input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        with redirect_stdout(io.StringIO()) as out:
            try:
                tune_process.serve(lambda shape, device: work)
            except SystemExit as end:
                return subprocess.CompletedProcess(command, 1, out.getvalue(), f"{end}\n")
        return subprocess.CompletedProcess(command, 0, out.getvalue(), "")

    monkeypatch.setattr("subprocess.run", run)
    tasks = [{"kernel": x, "settings": {}} for x in ("good", "bad", "good", "bad")]
    failed = {"failed": "RuntimeError: CUDA error: an illegal memory access"}
    try:
        assert ask("measure", tasks, Shape(), "cpu") == [{"ms": 1}, failed, {"ms": 1}, failed]
    finally:
        use_settings(None)


def test_a_candidate_is_not_blamed_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose time is up had many candidates. The one that it was at is the next one's first."""

    def run(command: list[str], input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        tasks = [task["kernel"] for task in json.loads(input)["tasks"]]
        done = tasks[:2] if "hangs" not in tasks[:2] else tasks[: tasks.index("hangs")]
        lines = "".join(json.dumps({"ms": int(x)}) + "\n" for x in done)
        if len(done) < len(tasks):
            raise subprocess.TimeoutExpired(command, 300, lines.encode())
        return subprocess.CompletedProcess(command, 0, lines, "")

    monkeypatch.setattr("subprocess.run", run)
    tasks = [{"kernel": x, "settings": {}} for x in ("1", "2", "3", "4", "hangs", "5")]
    late = {"failed": "no answer in 300 seconds"}
    assert ask("measure", tasks, Shape(), "cuda") == [{"ms": 1}, {"ms": 2}, {"ms": 3}, {"ms": 4}, late, {"ms": 5}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is slow enough for one tiny problem")
def test_candidates_are_measured_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from qed.bench import tune_process
    from qed.kernels.recurrence import launch, memory

    monkeypatch.setattr(tune_process, "CALLS", 1)
    monkeypatch.setattr(tune_process, "ROUNDS", 1)
    monkeypatch.setattr(tune_process, "REPEATS", 1)
    work = tune_process.measure(Shape(batch=1, tokens=70, heads=2, width=32), "cpu")
    try:
        for kernel in KERNELS:
            found = work({"kernel": kernel, "settings": {}})
            assert found["error"] == 0.0, kernel
        change = {"chunk_terms @ 32x32": {"BK": 16}}
        assert work({"kernel": "chunk_terms", "settings": change})["error"] < 5e-3
        monkeypatch.setattr(tune_process, "DIFFERENT", -1.0)
        assert "is off by" in work({"kernel": "chunk_terms", "settings": change})["failed"]
        with tune_process.recorded(run=False) as launches:
            tune_process.Problem.draw(Shape(batch=1, tokens=70, heads=2, width=32), "cpu", 1.0).results()
        assert sorted(x.name for x in launches) == sorted(KERNELS)
        few = tune_process.Problem.draw(Shape(batch=1, tokens=1024, heads=1, width=16), "cpu", 1.0)
        assert [few.launch_of(kernel).name for kernel in KERNELS] == list(KERNELS)
        assert few.launch_of("state_gradients").prepared.constants["OUTPUT"]
        for module in (launch, memory):
            monkeypatch.setattr(module, "multiprocessors", lambda _: 4)
        left = tune_process.Problem.draw(Shape(batch=3, tokens=64, heads=2, width=128), "cpu", 1.0)
        assert left.launch_of("chunk_states").prepared.constants["BV"] == 128  # and not that of the last two states
    finally:
        use_settings(None)


@pytest.mark.slow
def test_the_model_is_measured_behind_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qed.bench.model.compile_blocks", lambda model: None)  # a compiler is not what is tested
    file = tmp_path / "model.json"
    command = ["bench", "model", "--size", "tiny", "--device", "cpu", "--rounds", "1", "--out", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    ways = {"qed, stream", "qed, model.generate", "qed, stream, sampled", "qed, model.generate, sampled"}
    assert set(report["generation_tokens_per_second"]["64"]) == ways
    assert set(report["first_token_ms"]["128"]) == {"qed", "qed, plain forward", "qed, a piece that continues"}
    assert set(report["prefill_tokens_per_second"]["1 x 512"]) == {"qed", "qed compiled", "qed, strong decay"}
    monkeypatch.setattr("qed.bench.model.LOGITS_BAR", -1.0)
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "correctness gate" in refused.output


def test_strong_decay_is_beyond_reach_in_every_chunk_and_a_new_models_in_none() -> None:
    torch.manual_seed(0)
    model = QEDForCausalLM(QEDConfig(num_hidden_layers=2)).eval()
    x = model.model.embed_tokens(torch.randint(0, 32000, (1, 256)))

    def most() -> torch.Tensor:
        """What the fastest channel of every layer, chunk and head decays."""
        with torch.no_grad():
            decays = [block.mixer.projections(block.mixer_norm(x)).g for block in model.model.layers]
        return torch.stack(decays).unflatten(2, (4, 64)).sum(3).amin(-1)

    assert most().min() > -110
    decay_faster(model)
    assert most().max() < -110


def test_a_training_step_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    sizes = ["--size", "tiny", "--batch", "1", "--tokens", "40", "--rounds", "2", "--no-compile"]
    result = CliRunner().invoke(app, ["bench", "train", "--device", "cpu", *sizes, "--out", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    trades = {"qed, light", "qed, lean"}
    assert set(report["candidates"]) == {"qed", "qed, strong decay", "gdn2", "softmax attention"} | trades
    assert all(row["tokens_per_s"] > 0 for row in report["candidates"].values())
    assert QEDConfig(**report["config"]).to_diff_dict() == QEDConfig.tiny().to_diff_dict()


GROWTH = ["bench", "growth", "--device", "cpu", "--size", "tiny", "--rounds", "1", "--no-compile"]


def test_growth_is_measured_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, it goes on with its file; finished, it draws the file again, on any machine."""
    file = tmp_path / "growth.json"
    command = [*GROWTH, "--lengths", "32,64", "--out", str(file)]
    with monkeypatch.context() as interrupted:
        interrupted.setitem(growth._MEASURES, "training", lambda *_: 1 / 0)
        assert isinstance(CliRunner().invoke(app, command).exception, ZeroDivisionError)
    begun = json.loads(file.read_text())["cells"]
    assert set(begun["prefill"]["softmax"]) == set(begun["decoding"]["qed"]) == {"32", "64"}
    assert begun["training"]["qed"] == {}
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["cells"]["prefill"] == begun["prefill"]
    assert all(report["cells"]["training"][model]["64"]["tokens_per_s"] > 0 for model in ("qed", "softmax"))
    assert max(report["errors"].values()) < 1e-4
    table, figure = (file.with_suffix(x).read_text() for x in (".md", ".svg"))
    assert f"| 64 | {report['cells']['decoding']['qed']['64']['ms_per_token']:.3f} |" in table
    assert "QED" in figure
    assert "Transformer" in figure

    monkeypatch.setattr("qed.bench.measuring.environment", lambda device: {"gpu": "another"})
    file.with_suffix(".svg").unlink()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert file.with_suffix(".svg").read_text() == figure
    assert json.loads(file.read_text()) == report
    report["cells"]["training"]["qed"] = {}
    file.write_text(json.dumps(report))
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "expected a new file or one from this machine and package" in " ".join(refused.output.split())


def test_growth_says_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError("80 GiB")

    monkeypatch.setitem(growth._MEASURES, "prefill", too_large)
    bench = Bench(console=Console(quiet=True), device="cpu")
    wanted = growth.Growth(size={}, lengths=(32,), rounds=1, compiled=False)
    cell = growth._cell(bench, wanted, "prefill", "qed", 32)
    assert cell == {"skipped": "it needs more memory than this GPU has"}
    report = {"cells": {"prefill": {"qed": {"32": cell}, "softmax": {}, "fla": {}}}, "settings": {"lengths": [32]}}
    assert list(table(report, "prefill")) == [("32", [cell["skipped"], "", ""])]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--lengths", "48,64"], "--lengths: expected different divisors of the longest one, got [48, 64]"),
        (["--lengths", "64,64"], "--lengths: expected different divisors of the longest one, got [64, 64]"),
        (["--lengths", "64", "--out", "ops.json"], "expected a new file or one of `qed bench growth`, got ops.json"),
    ],
)
def test_growth_refuses(given: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ops.json").write_text('{"form": "triton"}')
    result = CliRunner().invoke(app, [*GROWTH, *given])
    assert result.exit_code == 1
    assert error in " ".join(result.output.split())
    assert Path("ops.json").read_text() == '{"form": "triton"}'


def test_a_transformers_step_is_its_forward() -> None:
    """Again and again: the cache stays as it is."""
    torch.manual_seed(0)
    model = QEDForCausalLM(transformer(dict(SIZES_OF_MODELS["tiny"]))).eval()
    ids = torch.randint(0, 256, (2, 20))
    with torch.no_grad():
        truth = model(ids).logits[:, -1]
        step = SoftmaxStep(model, model(ids[:, :-1], use_cache=True).past_key_values)
        for token in (ids[:, -1:].flip(0), ids[:, -1:]):
            step.tokens.copy_(token)
            step()
    torch.testing.assert_close(step.logits, truth)


def test_idle_is_what_nothing_covers() -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (6.0, 8.0), (8.0, 10.0), (13.0, 20.0)]
    assert idle(spans) == pytest.approx(0.2)
    assert idle(spans, shortest=2.0) == pytest.approx(0.15)
    assert idle(spans, shortest=4.0) == 0


def test_times_an_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("wonderwords")
    tokenization.train(documents(200), 400).save(str(tmp_path / "tokenizer.json"))
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--size", "tiny", "--device", "cpu", "--batch", "2"]
    options += ["--lengths", "512,1024", "--samples", "3", "--out", str(tmp_path / "eval.json")]
    result = CliRunner().invoke(app, ["bench", "eval", *options])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "eval.json").read_text())
    assert report["by_length"].keys() == {"niah_single_1-512", "niah_single_1-1024"}
    assert report["seconds"] > sum(report["by_length"].values()) > 0
    assert QEDConfig(**report["config"]).vocab_size == 400


@pytest.fixture
def words(tmp_path: Path) -> Path:
    pytest.importorskip("lm_eval")
    file = tmp_path / "tokenizer.json"
    tokenization.train([made_up.Words("bench").text(4000, 4000)], 512).save(str(file))
    return file


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # lm-eval's
def test_a_suite_beside_lm_evals_own_model(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task is timed; with a wrong score nothing is."""
    command = ["bench", "eval", "--suite", "commonsense", "--size", "tiny", "--samples", "4", "--device", "cpu"]
    command += ["--tokenizer", str(words), "--out", str(tmp_path / "suite.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "suite.json").read_text())
    assert set(report["tasks"]) == {f"lm-eval-{task}" for task in SUITES["commonsense"]}
    assert report["tasks"]["lm-eval-hellaswag"]["requests"] == 16
    assert QEDConfig(**report["config"]).vocab_size == 512
    assert report["ratio"] == pytest.approx(report["seconds"]["hf"] / report["seconds"]["qed"])
    (tmp_path / "suite.json").unlink()
    right = scoring._scores

    def wrong(*given: Any) -> list[scoring.Scores]:
        return [x._replace(log_probability=x.log_probability * 1.01) for x in right(*given)]

    monkeypatch.setattr(scoring, "_scores", wrong)
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, "correctness gate" in result.output) == (1, True)
    assert not (tmp_path / "suite.json").exists()
