"""The registered tests of recall are taken when every arm has all seeds at all widths, and not before."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from qed.analysis.capacity import SEEDS, TESTS, answers, missing, not_learned
from qed.analysis.settings import read_settings
from qed.eval.tasks.load import result_of
from qed.provenance import plan_sha256
from qed.recipes.generated import LOADS
from qed.report.arm_figures import capacities
from qed.report.arm_page import write_arms
from qed.report.arm_tables import capacity_tests
from qed.report.charts import Axis, Chart, Panel, Series
from qed.reproduce.collecting import collect
from qed.reproduce.plan import PLANS, Files, Plan, Unit, with_settings

ARMS = list(dict.fromkeys(arm for pair in TESTS.values() for arm in pair))
OCTAVES = {"gdn2": 0.0, "qed": 1.0, "qed-rand": 0.5, "qed@0.5": 1.0, "qed@1": 1.0}  # by which each arm holds more


def write(runs: Path, width: int, arm: str, seed: int, **made_by: str) -> None:
    """A training that answers everything up to a load and nothing above it."""
    folder = runs / str(width) / f"{arm}-{seed}"
    (folder / "eval").mkdir(parents=True)
    config = json.loads(PLANS["recall"](Files()).config(Unit(arm, seed, str(width)), folder).to_json())
    (folder / "config.json").write_text(json.dumps({"config": config, "identities": {}} | made_by))
    (folder / "metrics.jsonl").write_text('{"step": 2499, "tokens": 0, "loss": 1.0, "validation_loss": 1.0}\n')
    right = np.zeros((4, 64), dtype=bool)
    right[:, : 2 * round(2 ** (3 + OCTAVES[arm] + 0.1 * seed))] = True
    made = {"provenance": made_by} if made_by else {}
    about = {"task": "recall_load", "length": 4 * LOADS[width][0]}
    (folder / "eval" / "recall_load.json").write_text(json.dumps({"about": about, "result": result_of(right)} | made))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for width in LOADS:
        for arm in ARMS:
            for seed in range(SEEDS):
                write(tmp_path, width, arm, seed)
    return tmp_path


def test_complete(runs: Path) -> None:
    found, problems = read_settings(runs)
    assert problems == []
    assert missing(found) == []
    estimates = {x.name: x.estimate.value for x in answers(found)}
    assert list(estimates) == list(TESTS)
    assert estimates["QED − GDN-2"] > estimates["QED − QED-rand"] > 0 == estimates["QED with λ_max 1 − QED"]


def test_a_width_or_a_seed_is_missing(runs: Path) -> None:
    (runs / "64" / "qed-rand-1").rename(runs / "gone")
    found, _ = read_settings(runs)
    assert missing(found) == ["qed-rand: 2 of 3 seeds are trained at all of 16, 32, 64 and 128 channels"]
    halves = {width: found[width] for width in ("16", "32")}
    assert missing(halves) == [f"{arm}: 0 of 3 seeds are trained at all of 16, 32, 64 and 128 channels" for arm in ARMS]


def test_a_width_that_no_training_has_learned_is_named(runs: Path) -> None:
    for seed in range(SEEDS):
        file = runs / "16" / f"gdn2-{seed}" / "eval" / "recall_load.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"result": result_of(np.zeros((4, 64), dtype=bool))}))
        if seed < SEEDS - 1:
            assert not_learned(read_settings(runs)[0]) == []
    found, _ = read_settings(runs)
    assert not_learned(found) == ["GDN-2 with 16 channels"]
    note = capacity_tests(found, registered=True).note
    assert note.endswith("Not learned by any training, and in the means all the same: GDN-2 with 16 channels.")


def test_seeds_beyond_the_plan_do_not_count(tmp_path: Path) -> None:
    code, plan = "c" * 64, tmp_path / "PLAN.md"
    plan.write_text(f"# Plan\n\n## Additions\n\nCode of E4:\n\n    {code}\n")
    for seed in (1, 2, SEEDS):
        write(tmp_path / "runs", 16, "qed", seed, code=code, plan=plan_sha256(plan))
    write_arms([tmp_path / "runs"], tmp_path / "out", plan=plan)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "2 trainings of qed" in report
    assert "- 16/qed-3: its seed is 3, and the plan's are 0 to 2" in report
    assert "qed: 0 of 3 seeds are trained at all of" in report


def machine(out: Path, trained: Plan, **made_by: str) -> Path:
    """A folder of `qed reproduce` with all of its trainings, and a report."""
    for unit in trained.units:
        write(out / "runs", int(unit.setting), unit.arm, unit.seed, **made_by)
    (out / "plan.json").write_text(trained.to_json())
    (out / "report").mkdir()
    (out / "report" / "report.md").write_text(f"of {', '.join(trained.settings)}")
    return out


def two_machines(place: Path, **made_by: str) -> list[Path]:
    """One that trained the two smaller widths, and one that trained the others."""
    plan = dataclasses.replace(PLANS["recall"](Files()), arms=tuple(ARMS), registered=made_by.get("plan", ""))
    halves = [with_settings(plan, widths) for widths in (("16", "32"), ("64", "128"))]
    return [machine(place / half.settings[0], half, **made_by) for half in halves]


def test_collected_from_two_machines(tmp_path: Path) -> None:
    """The plan says all widths, the report is not that of a half, and the registered tests are those of all widths."""
    code, plan = "c" * 64, tmp_path / "PLAN.md"
    plan.write_text(f"# Plan\n\n## Additions\n\nCode of E4:\n\n    {code}\n")
    made_by = {"code": code, "plan": plan_sha256(plan)}
    first, second = two_machines(tmp_path, **made_by)
    kept = tmp_path / "kept"
    assert collect(first, kept) == 2 * 5 * SEEDS
    assert (kept / "report.md").read_text() == "of 16, 32"
    collect(second, tmp_path / "packed")
    for folder in (second, tmp_path / "packed"):  # packed there, and carried here, it can be collected too
        assert collect(folder, kept) == 2 * 5 * SEEDS
        assert (kept / "report.md").read_text() == "of 16, 32"
        said = json.loads((kept / "plan.json").read_text())
        assert said["settings"] == ["16", "32", "64", "128"]
        assert (said["arms"], said["seeds"]) == (ARMS, [0, 1, 2])
    write_arms([kept], kept, plan=plan)
    report = (kept / "report.md").read_text()
    assert f"{4 * 5 * SEEDS} trainings of" in report
    assert "Registered: differences in capacity over trainings" in report
    assert "## Left out" not in report
    with (kept / "tables" / "recall_capacity.csv").open() as file:
        assert [x.split(" ")[0] for x in next(csv.reader(file))[1:-1]] == ["16", "32", "64", "128"]


def test_trainings_of_a_plan_are_not_tested_early(tmp_path: Path) -> None:
    """Also where the report is not given the plan, as at the end of `qed reproduce --plan`."""
    first, _ = two_machines(tmp_path, code="c" * 64, plan="d" * 64)
    write_arms([first], tmp_path / "half")
    report = (tmp_path / "half" / "report.md").read_text()
    assert "The registered tests are not taken yet. qed: 0 of 3 seeds" in report
    assert "differences in capacity over trainings" not in report
    assert not (tmp_path / "half" / "tables" / "recall_tests.csv").exists()


def test_another_reproduction_is_not_collected_beside(tmp_path: Path) -> None:
    first, second = two_machines(tmp_path)
    collect(first, tmp_path / "kept")
    before = {x: x.read_bytes() for x in (tmp_path / "kept").rglob("*") if x.is_file()}
    changed = json.loads((second / "plan.json").read_text()) | {"samples": 4, "changes": {"learning_rate": "0.5"}}
    (second / "plan.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"kept has results of other changes, samples; use another folder"):
        collect(second, tmp_path / "kept")
    assert before == {x: x.read_bytes() for x in (tmp_path / "kept").rglob("*") if x.is_file()}


def test_the_figure_has_a_panel_for_rules_with_a_correction(runs: Path) -> None:
    """GDN-2 stands among both, points of one size stand beside each other in every panel, and say their size."""
    found, _ = read_settings(runs)
    (whole,) = capacities({width: [x for x in own if x.arm == "gdn2"] for width, own in found.items()}).panels
    assert (whole.title, [x.name for x in whole.series]) == ("", ["GDN-2"])
    with_one, without = capacities(found).panels
    assert [x.name for x in without.series] == ["GDN-2"]
    assert [x.name for x in with_one.series] == ["GDN-2", "QED", "QED-rand", "qed@0.5", "qed@1"]
    sizes = list(without.x.ticks)
    assert np.allclose(without.series[0].x, sizes)
    for i, size in enumerate(sizes):
        beside = [one.x[i] for one in with_one.series]
        assert beside == sorted(set(beside))
        assert np.isclose(beside[2], size)
        assert {with_one.x.shown(x) for x in beside} == {f"{size:,.0f} numbers"}


def test_every_name_is_in_a_legend_once() -> None:
    """In panels that have names of their own, or beside them where there is no room."""
    mpl = pytest.importorskip("matplotlib")
    from qed.report import drawing

    def legends(*panels: list[str]) -> tuple[list[list[str]], list[str]]:
        with mpl.rc_context(drawing.LIGHT):
            axis = Axis(label="")
            shown = [
                Panel(x=axis, y=axis, series=[Series(name=x, colour=i, x=[0.0], y=[1.0]) for i, x in enumerate(names)])
                for names in panels
            ]
            figure = drawing._figure(Chart(title="", caption="", panels=list(shown)))
        inside = [[] if x.get_legend() is None else [t.get_text() for t in x.get_legend().texts] for x in figure.axes]
        beside = [text.get_text() for legend in figure.legends for text in legend.texts]
        drawing.plt.close(figure)
        return inside, beside

    many = [f"arm {i}" for i in range(13)]
    assert legends(["a", "b"], ["a"]) == ([["a", "b"], []], [])
    assert legends(["a"], ["a", "b"], ["a", "c"], ["c"]) == ([[], ["a", "b"], ["a", "c"], []], [])
    assert legends(["a"], many) == ([[], []], [*many, "a"])
