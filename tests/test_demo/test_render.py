"""The README's figures come from a result file and from nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import dialects, render, startup
from benchmarks.demo.target import ROOT
from benchmarks.stamp import demo_draft
from sglang_eagle3_ext.host import report


@pytest.fixture
def result() -> dict[str, Any]:
    def run(name: str, rounds: list[float], length: float | None, identical: float, ties: int | None):
        return {
            "name": name,
            "tok_s": sorted(rounds)[len(rounds) // 2],
            "tok_s_rounds": rounds,
            "spec_accept_length": length,
            "identical": identical,
            "near_ties": ties,
        }

    return {
        "date": "2031-02-03",
        "machine": {"cpu": "A CPU", "cores": 7},
        "versions": {"sglang": "9.8.7", "torch": "6.5.4"},
        "settings": {"dtype": "bfloat16", "questions": 11, "max_tokens": 48, "rounds": 3},
        "runs": [
            run("baseline", [10.0, 9.5, 10.25], None, 1.0, None),
            run("stock", [8.0, 8.5, 7.75], 1.125, 0.9, 1),
            run("ours", [13.0, 12.5, 14.75], 1.875, 0.8, 2),
        ],
        "differences": [
            {"name": "stock", "question": 3},
            {"name": "ours", "question": 1},
            {"name": "ours", "question": 1},
            {"name": "ours", "question": 4},
        ],
    }


def test_every_figure_is_in_its_row(result: dict[str, Any]):
    lines = render.figures(result).splitlines()
    ours = next(line for line in lines if line.startswith("| " + report.LABELS["ours"]))
    cells = [cell.strip() for cell in ours.strip("|").split("|")]
    assert cells[1:] == ["13.00", "12.50 to 14.75", "1.30x", "1.88", "80 %", "2 of 2 differing"]
    assert "A CPU, 7 cores" in lines[-1]
    assert "11 questions" in lines[-1]


def test_rendering_replaces_the_region_only(result: dict[str, Any]):
    text = "before\n<!-- figures: by make docs -->\nold\n<!-- end of figures -->\nafter\n"
    once = render.replace_region(text, "figures", render.figures(result))
    assert once.startswith("before\n<!-- figures: by make docs -->\n| server |")
    assert once.endswith("<!-- end of figures -->\nafter\n")
    assert "old" not in once
    assert render.replace_region(once, "figures", render.figures(result)) == once


def test_a_readme_without_the_region_is_an_error():
    with pytest.raises(SystemExit, match="`figures`"):
        render.replace_region("# title\n", "figures", "")


def test_readme_shows_the_committed_result():
    readme = render.README.read_text()
    assert render.render(readme, render.committed(render.RESULT)) == readme, "run: make docs"


def test_compatibility_names_every_symbol_that_is_touched():
    text = render.COMPATIBILITY.read_text()
    assert render.render_compatibility(text) == text, "run: make docs"


def test_the_story_is_what_its_result_says():
    text = render.STORY.read_text()
    assert render.render_story(text, render.committed(render.PAIR)) == text, "run: make docs"


def test_readmes_figures_are_of_this_draft():
    result = render.committed(render.RESULT)
    assert result is not None
    assert result["settings"]["draft_sha256"] == demo_draft()


def test_the_pair_is_this_draft_and_meets_its_bars():
    result = render.committed(render.PAIR)
    assert result is not None
    settings = result["settings"]
    assert settings["draft_sha256"] == demo_draft()
    assert settings["rounds"] >= 5
    assert {name: group["prompts"] for name, group in result["groups"].items()} == {"seen": 20, "unseen": 20}
    runs = {run["name"]: run for run in result["runs"]}
    assert runs["stock"]["spec_accept_length"] <= 1.25
    assert runs["stock_permuted"]["spec_accept_length"] <= 1.3
    assert result["ratios"]["stock"]["of_medians"] < 1
    assert len({runs[name]["verify_steps"] for name in ("ours", "ours_permuted", "stock_ids")}) == 1
    assert runs["ours"]["spec_accept_length"] > 1.5


def test_the_story_shows_the_command_that_measured_it():
    result = render.committed(render.PAIR)
    assert result is not None
    settings = result["settings"]
    shown = render.STORY.read_text().replace("\\\n", " ")
    (command,) = (line for line in shown.splitlines() if "sglang-eagle3 bench" in line)
    assert f"OMP_NUM_THREADS={settings['threads']} " in command
    assert f"--tokens {settings['max_tokens']} " in command
    assert f"--dtype {settings['dtype']}" in command
    assert ("--rounds" in command) is (settings["rounds"] != 5)


def test_evaluation_prompts_are_in_no_training_text():
    asked = json.loads((ROOT / "benchmarks" / "demo" / "prompts_eval.json").read_text())
    assert {half: len(entries) for half, entries in asked.items()} == {"seen": 20, "unseen": 20}
    train = ROOT / "benchmarks" / "demo" / "train"
    files = ("questions.txt", "questions_validation.txt", "prompts.py")
    text = "\n".join((train / name).read_text() for name in files).lower()
    assert [e["prompt"] for half in asked.values() for e in half if e["prompt"].lower() in text] == []
    assert [e["topic"] for e in asked["unseen"] if e["topic"].lower() in text] == []


def test_the_drafts_card_names_its_weights():
    card = (ROOT / "benchmarks" / "demo" / "draft" / "README.md").read_text()
    assert demo_draft() in card
    assert (ROOT / "benchmarks" / "demo" / "draft" / "model.safetensors").stat().st_size <= 26_000_000


def test_starting_costs_at_most_a_second_and_what_the_page_says():
    text, result = render.INSTALL.read_text(), render.committed(startup.OUT)
    assert render.render_install(text, result) == text, "run: make docs"
    assert result is not None
    costs = startup.added(result)
    assert set(costs) == {*startup.KINDS, startup.WITH_DRAFT}
    assert max(costs.values()) <= 1


def test_every_dialect_was_served_with_this_draft_in_the_same_steps():
    result = render.committed(dialects.RESULT)
    assert result is not None
    assert result["draft_sha256"] == demo_draft()
    assert {row["format"] for row in result["served"].values()} == {
        "speculators", "eagle", "modelopt", "torchspec", "automodel", "angelslim", "vllm",
    }  # fmt: skip
    assert len({(row["tokens"], row["verify_steps"]) for row in result["served"].values()}) == 1
    page = dialects.PAGE.read_text()
    assert dialects.render(page, result) == page, "run: make docs"
