"""Every task of every suite, from a file to its scores: lm-eval's `hf` model gives the same on the same files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from qed import QEDConfig, QEDForCausalLM
from qed.bench import made_up
from qed.cli import app
from qed.data import tokenization
from qed.data.tokenizer_files import as_transformers
from qed.eval.harness import tasks as harness_tasks
from qed.eval.harness.journal import Journal
from qed.eval.harness.model import harness_model
from qed.eval.harness.running import run
from qed.eval.harness.suites import MEMBERS, PREFIX, SUITES
from qed.eval.options import Options

COUNT = 6
COMMONSENSE = list(SUITES["commonsense"])
QUIET = Console(quiet=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # lm-eval's index takes seconds; warnings: theirs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    made_up.write(folder, [name for name in MEMBERS if MEMBERS[name].reads_file], COUNT)
    return folder


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    words = as_transformers(tokenization.load(str(checkpoint / "tokenizer.json")))
    return HFLM(
        pretrained=QEDForCausalLM.from_pretrained(checkpoint).eval(), tokenizer=words, batch_size=4, max_length=8192
    )


def files(folder: Path, tasks: list[str]) -> dict[str, Path]:
    return {task: next(folder.glob(f"{task}.json*")) for task in tasks if MEMBERS[task].reads_file}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_suite_has_lm_evals_own_scores(checkpoint: Path, data: Path, theirs: Any, tmp_path: Path) -> None:
    """Of all eleven tasks: loglikelihoods to 1e-4, accuracies exactly, perplexities to 1e-4 of them."""
    from lm_eval.evaluator import evaluate

    options = Options(data=files(data, COMMONSENSE), batch=4)
    found = run(checkpoint, ["commonsense"], options, out=tmp_path, device="cpu", console=QUIET)
    assert list(found) == [f"{PREFIX}-{task}" for task in COMMONSENSE]
    built = harness_tasks.built(COMMONSENSE, options)
    truth = evaluate(theirs, {"tasks": built}, bootstrap_iters=0, log_samples=True)
    accuracies = []
    for task in COMMONSENSE:
        whole = json.loads((tmp_path / f"{PREFIX}-{task}.json").read_text())
        assert whole["about"]["version"] == truth["versions"][task]
        assert whole["about"]["lm_eval"] == "0.4.13"
        measures, wanted = whole["result"][task], truth["results"][task]
        assert measures["sample_len"] == COUNT
        for key in (f"{name},none" for name in ("acc", "acc_norm") if f"{name},none" in wanted):
            assert measures[key] == wanted[key]
            accuracies.append(wanted[key])
        for name in (x for x in MEMBERS[task].shown if x not in ("acc", "acc_norm")):
            assert measures[f"{name},none"] == pytest.approx(wanted[f"{name},none"], rel=1e-4)
        ours = {row["index"]: row["prediction"] for row in lines(tmp_path / f"{PREFIX}-{task}.jsonl")}
        for sample in truth["samples"][task]:
            said = torch.tensor([float(x[0][0] if isinstance(x[0], tuple) else x[0]) for x in sample["resps"]])
            mine = ours[sample["doc_id"]]
            several = isinstance(mine, list) and isinstance(mine[0], list)
            mine = torch.tensor([x[0] for x in mine] if several else [mine[0] if isinstance(mine, list) else mine])
            assert torch.allclose(mine, said, rtol=1e-6, atol=1e-4)
        assert not (tmp_path / f"{PREFIX}-{task}.answers.jsonl").exists()
    assert len(set(accuracies)) > 2  # nor all right nor all wrong


@pytest.mark.parametrize("window", [64, None])
def test_a_text_in_windows_is_lm_evals_own(checkpoint: Path, theirs: Any, window: int | None) -> None:
    """A text of several windows, and one that fits; `max_length` means the same."""
    from lm_eval.api.instance import Instance

    words = made_up.Words("windows")
    asked = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0, metadata=("x", i, 1))
        for i, text in enumerate((words.text(120, 130), words.text(5, 6), words.text(60, 70)))
    ]
    ours = harness_model()(str(checkpoint), batch_size=2, **({} if window is None else {"max_length": window}))
    theirs._max_length, before = window or 8192, theirs._max_length
    try:
        truth = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    finally:
        theirs._max_length = before
    assert ours.loglikelihood_rolling(asked) == pytest.approx(truth, abs=1e-3, rel=1e-6)


def test_what_is_generated_is_lm_evals_own(checkpoint: Path, theirs: Any) -> None:
    """Up to a stop, of any length, in batches of other lengths."""
    from lm_eval.api.instance import Instance

    words = made_up.Words("generated")
    texts = [words.text(n, n + 5) for n in (80, 5, 33, 12, 60)]

    def asked(until: list[str]) -> list[Any]:
        settings = {"until": until, "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
        return [
            Instance(
                request_type="generate_until", doc={}, arguments=(text, dict(settings)), idx=0, metadata=("x", i, 1)
            )
            for i, text in enumerate(texts)
        ]

    ours = harness_model()(str(checkpoint), batch_size=2)
    whole = ours.generate_until(asked([]))
    assert whole == theirs.generate_until(asked([]), disable_tqdm=True)
    stop = whole[1][3:5]
    cut = ours.generate_until(asked([stop]))
    assert cut == [text.split(stop)[0] for text in whole]
    assert cut != whole
    for length in (20, 24):  # no room for a prompt, which lm-eval refuses too
        with pytest.raises(ValueError, match=f"--max-length: expected more than 24 new tokens, got {length}"):
            harness_model()(str(checkpoint), batch_size=2, max_length=length).generate_until(asked([]))


def test_a_text_begins_with_the_tokenizers_own_token(checkpoint: Path) -> None:
    """With `bos`, where the tokenizer has <s>: before contexts, and once before a whole text."""
    from lm_eval.api.instance import Instance

    words = tokenization.load(str(checkpoint / "tokenizer.json"))
    words.add_special_tokens(["<s>"])
    torch.manual_seed(0)
    config = QEDConfig.tiny(vocab_size=1032, eos_token_id=0, bos_token_id=None, initializer_range=0.3)
    model = QEDForCausalLM(config).eval()
    begin = words.token_to_id("<s>")

    def asked(kind: str, *arguments: str) -> list[Any]:
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("x", 0, 1))]

    def truth(ids: list[int], first: int) -> float:
        logits = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1).detach()
        return float(sum(logits[i - 1, ids[i]] for i in range(first, len(ids))))

    ids = words.encode("soda defu lipe", add_special_tokens=False).ids
    context = words.encode("soda", add_special_tokens=False).ids
    for bos, start in ((True, [begin]), (False, [])):
        ours = harness_model()(model, tokenizer=words, bos=bos, batch_size=2)
        ((found, _),) = ours.loglikelihood(asked("loglikelihood", "soda", " defu lipe"))
        assert found == pytest.approx(truth([*start, *ids], len(start) + len(context)), abs=1e-4)
        ((found, _),) = ours.loglikelihood(asked("loglikelihood", "", "soda defu lipe"))
        assert found == pytest.approx(truth([begin, *ids], 1), abs=1e-4)
        (whole,) = ours.loglikelihood_rolling(asked("loglikelihood_rolling", "soda defu lipe"))
        assert whole == pytest.approx(truth([begin, *ids], 1), abs=1e-4)


def test_a_killed_run_goes_on_and_gives_the_same(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Cut off in the middle of a line; what was answered is not asked again; a finished task is not run again."""
    tasks = ["hellaswag", "lambada_openai"]
    options = Options(data=files(data, tasks), batch=2)

    def go(out: Path) -> None:
        run(checkpoint, tasks, options, out=out, device="cpu", console=QUIET)

    go(tmp_path / "whole")
    kept: list[list[str]] = []
    add = Journal.add

    def stopped(self: Journal, kind: str, index: int, *rest: Any) -> None:
        if len(self.answers) == 9:
            raise KeyboardInterrupt
        add(self, kind, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", stopped)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "cut")
    journal = tmp_path / "cut" / f"{PREFIX}-hellaswag.answers.jsonl"
    written = journal.read_text().splitlines(keepends=True)
    assert len(written) == 9
    journal.write_text("".join(written[:7]) + written[7][:20])

    def counted(self: Journal, kind: str, index: int, *rest: Any) -> None:
        kept.append([kind, str(index)])
        add(self, kind, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", counted)
        go(tmp_path / "cut")
    assert len(kept) == 4 * COUNT - 7 + COUNT
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / path.name).read_bytes() == path.read_bytes()
    assert {x.name for x in (tmp_path / "cut").iterdir()} == {x.name for x in (tmp_path / "whole").iterdir()}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").iterdir()}
    go(tmp_path / "whole")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").iterdir()}


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.split())


def test_one_command(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    status, text = said(checkpoint, "--suite", "commonsense", "--data", data, "--samples", 2, "--out", tmp_path)
    assert status == 0, text
    for task in COMMONSENSE:
        for measure in MEMBERS[task].shown:
            assert f"│ {task} │ │ {measure} │" in text
    assert (tmp_path / f"{PREFIX}-piqa.json").exists()


def test_all_data_that_are_missing_are_named_at_once(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """And nothing is run or written, though the first tasks have theirs."""
    few = tmp_path / "few"
    few.mkdir()
    for task in ("wikitext", "copa", "sciq"):
        shutil.copy(data / f"{task}.jsonl", few)
    status, text = said(checkpoint, "--suite", "commonsense", "--data", few, "--out", tmp_path / "out")
    missing = "lambada_openai, piqa, hellaswag, winogrande, arc_easy, arc_challenge, boolq, openbookqa"
    assert (
        status,
        f"--data: expected NAME=FILE, or the data set from the hub, for {missing}; got neither" in text,
    ) == (
        1,
        True,
    ), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("piqa", {"goal": "a", "sol1": "b", "label": 0}, "piqa.jsonl:1: expected sol2 of piqa, of type str, got none"),
        (
            "boolq",
            {"passage": "a", "question": "b", "label": "yes"},
            "expected label of boolq, of type int, got str 'yes'",
        ),
        ("copa", None, "copa.jsonl: expected examples of copa, got none"),
        (
            "arc_easy",
            {"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"},
            "arc_easy.jsonl: expected examples of arc_easy, got one without: ValueError: 'B' is not in list",
        ),
        (
            "piqa",
            {"goal": "a", "sol1": "b", "sol2": "c", "label": -1},
            "piqa.jsonl: example 1: expected the right answer among its 2 choices, got -1",
        ),
        (
            "winogrande",
            {"sentence": "a b", "option1": "c", "option2": "d", "answer": "1"},
            "winogrande.jsonl: expected examples of winogrande, got one without: ValueError: substring not found",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    checkpoint: Path, tmp_path: Path, task: str, row: dict[str, Any] | None, message: str
) -> None:
    file = tmp_path / f"{task}.jsonl"
    file.write_text("" if row is None else json.dumps(row) + "\n")
    status, text = said(
        checkpoint, "--harness", "lm-eval", "--task", task, "--data", f"{task}={file}", "--out", tmp_path / "out"
    )
    assert (status, message in text) == (1, True), text
    assert not (tmp_path / "out").exists()


def test_results_of_other_data_are_not_mixed_in(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    task, out = ["copa"], tmp_path / "out"
    run(checkpoint, task, Options(data=files(data, task)), out=out, device="cpu", console=QUIET)
    rows = lines(data / "copa.jsonl")
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    other = Options(data={"copa": tmp_path / "copa.jsonl"})
    with pytest.raises(ValueError, match="another evaluation is there; examples was"):
        run(checkpoint, task, other, out=out, device="cpu", console=QUIET)
