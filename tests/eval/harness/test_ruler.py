"""All 13 tasks of RULER, drawn by lm-eval's own code from made-up files, answered as lm-eval's `hf` model does."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qed.bench import made_up
from qed.data import tokenization
from qed.data.tokenizer_files import as_transformers
from qed.eval.harness.ruler import QUESTIONS, Ruler
from qed.eval.harness.running import HarnessRun, run
from qed.eval.harness.suites import MEMBERS, PREFIX, SUITES
from qed.eval.options import Options
from qed.model.causal_lm import QEDForCausalLM

RULER = list(SUITES["ruler"])
LENGTH = 2048
QUIET = Console(quiet=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # lm-eval's word list takes seconds to make


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("data")
    data = made_up.write(folder, RULER, 20)
    return Options(lengths=(LENGTH,), samples=3, data=data, essays=made_up.essays(folder, 4000), batch=2)


@pytest.fixture(scope="module")
def ruler(checkpoint: Path, options: Options, tmp_path_factory: pytest.TempPathFactory) -> Ruler:
    folder = tmp_path_factory.mktemp("words")
    words = as_transformers(tokenization.load(str(checkpoint / "tokenizer.json")))
    words.save_pretrained(folder)
    return Ruler(options, words, folder, folder / "out")


def test_all_tasks_have_lm_evals_own_answers_and_scores(checkpoint: Path, options: Options, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.ruler import common_utils

    found = run(checkpoint, ["ruler"], options, out=tmp_path, device="cpu", console=QUIET)
    assert list(found) == [f"{PREFIX}-{task}-{LENGTH}" for task in RULER]
    words = as_transformers(tokenization.load(str(checkpoint / "tokenizer.json")))
    theirs = HFLM(
        pretrained=QEDForCausalLM.from_pretrained(checkpoint).eval(),
        tokenizer=words,
        batch_size=2,
        max_length=2 * LENGTH,
    )
    place: dict[str, Any] = {"out": tmp_path, "device": "cpu", "console": QUIET, "folder": tmp_path / "words"}
    jobs = {job.task: job for job in HarnessRun(checkpoint, None, options, **place).jobs(["ruler"])}
    for task in RULER:
        built = jobs[task].make()
        built.build_all_requests(limit=3)
        truth = theirs.generate_until(built.instances, disable_tqdm=True)
        (prompts,) = (tmp_path / "prompts").glob(f"{task}-{LENGTH}-*.jsonl")
        drawn = [json.loads(line) for line in prompts.read_text().splitlines()]
        rows = [json.loads(line) for line in (tmp_path / f"{PREFIX}-{task}-{LENGTH}.jsonl").read_text().splitlines()]
        assert len(drawn) == len(rows) == 3
        score = common_utils.process_results_part if task in QUESTIONS else common_utils.process_results
        for row in rows:
            example = drawn[row["index"]]
            assert row["prediction"] == truth[row["index"]]
            assert row["prompt_end"].endswith(example["gen_prefix"])
            assert row["metrics"] == {str(LENGTH): score(example, [row["prediction"]])[str(LENGTH)]}
            if task not in QUESTIONS:
                assert all(x in example["input"] for x in example["outputs"])
            # Of FWE the prompt alone has the length, without the answer.
            assert len(words(example["input"]).input_ids) <= LENGTH
        summary = json.loads((tmp_path / f"{PREFIX}-{task}-{LENGTH}.json").read_text())
        mean = sum(row["metrics"][str(LENGTH)] for row in rows) / 3
        assert summary["result"][task][f"{LENGTH},none"] == pytest.approx(mean)
        assert summary["about"]["version"] == 1.0
        assert summary["about"]["prompts"] == prompts.name


@pytest.mark.parametrize("task", ["niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_qa_squad"])
def test_prompts_are_the_same_whenever_they_are_drawn(ruler: Ruler, task: str) -> None:
    """Fewer are the first ones of more; the global random numbers are left as they were."""
    random.seed(5)
    state = random.getstate()
    first = ruler.draw(task, LENGTH, 4)
    random.random()
    second = ruler.draw(task, LENGTH, 2)
    assert second == first[:2]
    random.seed(5)
    ruler.draw(task, LENGTH, 1)
    assert random.getstate() == state


def test_an_edited_prompt_is_noticed(ruler: Ruler) -> None:
    assert ruler.rows("ruler_fwe", LENGTH) == ruler.rows("ruler_fwe", LENGTH)
    path = ruler.path("ruler_fwe", LENGTH)
    path.write_text(path.read_text().replace("coded", "code", 1))
    with pytest.raises(ValueError, match="expected the prompts as they were frozen"):
        ruler.rows("ruler_fwe", LENGTH)


def refused(ruler: Ruler, task: str, message: str, **other: Any) -> None:
    from dataclasses import replace

    changed = Ruler(replace(ruler.options, **other), ruler.tokenizer, ruler.folder, ruler.prompts.parent)
    with pytest.raises(ValueError, match=message):
        changed.check([task])


@pytest.mark.parametrize("task", [*RULER])
def test_a_length_that_is_too_short_is_named(ruler: Ruler, task: str) -> None:
    """Where lm-eval would look for a prompt forever too."""
    refused(ruler, task, "--lengths: expected", lengths=(100,))


@pytest.mark.parametrize("task", [name for name in RULER if MEMBERS[name].essays or name in QUESTIONS])
def test_a_length_that_the_text_cannot_fill_is_named(ruler: Ruler, task: str) -> None:
    refused(
        ruler, task, r"expected text of 131072 tokens or more .*: it cannot fill --lengths 131072", lengths=(131072,)
    )


def test_a_file_that_is_not_the_data_set_is_named(ruler: Ruler, tmp_path: Path) -> None:
    file = tmp_path / "squad.json"
    file.write_text('{"data": [{"paragraphs": 3}]}')
    refused(ruler, "ruler_qa_squad", "--data: expected SQuAD's dev-v2.0.json", data={"ruler_qa_squad": file})
