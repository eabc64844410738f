"""The table of stock's readings against SGLang's own setters, run on stand-ins for the models.

The setters are cut out of SGLang's source, so that no model is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
from checkpoints import write_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.spec import STOCK_READINGS, StockView, TargetFacts, parse_source

pytestmark = pytest.mark.host

LAST_STAGE = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True))
SETTER = "set_eagle3_layers_to_capture"
# Drafts and embedding models inherit a setter, too; nobody serves them as a target.
NO_TARGETS = re.compile(r"NextN$|MTP$|Eagle3?$|Assistant|Embedding|MindSpore")
INNER = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "LlamaForCausalLM",
}


@pytest.fixture(scope="module")
def setters():
    """Map every architecture that SGLang registers to the setter it inherits."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("sglang is not installed")
    models = Path(found.submodule_search_locations[0]) / "srt/models"
    texts = {path.stem: path.read_text() for path in sorted(models.glob("*.py"))}
    bases, owners, entries, imported = {}, {}, {}, {}
    for module, text in texts.items():
        for match in re.finditer(r"^class (\w+)\(([^)]*)\):", text, re.MULTILINE):
            bases[module, match[1]] = re.findall(r"[\w.]+", match[2])
        for match in re.finditer(r"from sglang\.srt\.models\.(\w+) import (?:\(([^)]*)\)|(.+))", text):
            for name in re.findall(r"\w+", match[2] or match[3]):
                imported[module, name] = (match[1], name)
        entry = re.search(r"^EntryClass = (\[[^\]]*\]|\w+)", text, re.MULTILINE)
        entries[module] = re.findall(r"\w+", entry[1]) if entry else []
        if f"def {SETTER}" in text:
            for node in ast.parse(text).body:
                for item in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(item, ast.FunctionDef) and item.name == SETTER:
                        space = {"Optional": Optional, "List": list, "get_parallel": lambda: LAST_STAGE}
                        exec(compile(ast.Module([item], []), module, "exec"), space)
                        owners[module, node.name] = space[SETTER]

    def inherited(module, name):
        key = imported.get((module, name), (module, name))
        if key in owners:
            return owners[key]
        for base in bases.get(key, ()):
            if (setter := inherited(key[0], base.split(".")[-1])) is not None:
                return setter
        return None

    return {
        name: setter
        for module, names in entries.items()
        for name in names
        if (setter := inherited(module, name)) is not None and not NO_TARGETS.search(name)
    }


def captured(setters, architecture, ids, n):
    """Run SGLang's setter and return what it would capture, in its own order."""
    layers = [SimpleNamespace() for _ in range(n + 2)]

    class Inner(SimpleNamespace):
        def set_eagle3_layers_to_capture(self, wanted):
            self.layers_to_capture = wanted

    def model(inner):
        return SimpleNamespace(
            pp_group=LAST_STAGE.pp_group,
            config=SimpleNamespace(num_hidden_layers=n, text_config=SimpleNamespace(num_hidden_layers=n)),
            model=Inner(layers=layers[:n]),
            language_model=inner,
        )

    language = Inner()
    if architecture in INNER:
        language = model(None)
        language.set_eagle3_layers_to_capture = lambda ids: setters[INNER[architecture]](language, ids)
    whole = model(language)
    setters[architecture](whole, ids)
    places = (whole.model, language, getattr(language, "model", None))
    return next(p.layers_to_capture for p in places if hasattr(p, "layers_to_capture"))


def test_the_table_has_every_target_class(setters):
    assert set(setters) == set(STOCK_READINGS)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return formats.read_draft(write_draft(tmp_path_factory.mktemp("draft")))


def plan_with(spec, architecture, ids, n):
    facts = TargetFacts("t", architecture, n, 32, 96, STOCK_READINGS[architecture])
    return assembly.plan(replace(spec, stock=StockView(ids)), facts)


@pytest.mark.parametrize("architecture", sorted(STOCK_READINGS))
@pytest.mark.parametrize("n", [8, 61])
def test_default(setters, spec, architecture, n):
    assert plan_with(spec, architecture, None, n).stock_boundaries == tuple(captured(setters, architecture, None, n))


@pytest.mark.parametrize("architecture", sorted(STOCK_READINGS))
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_ids(setters, spec, architecture, data):
    n = data.draw(st.integers(8, 61), label="n")
    ids = tuple(data.draw(st.lists(st.integers(-2, n + 1), min_size=1, max_size=6), label="ids"))
    wanted = captured(setters, architecture, list(ids), n)
    highest = n if STOCK_READINGS[architecture].captures_last else n - 1
    whole = len(set(wanted)) == len(wanted) and all(0 <= b <= highest for b in wanted)
    assert plan_with(spec, architecture, ids, n).stock_boundaries == (tuple(sorted(wanted)) if whole else None)


@pytest.mark.parametrize("architecture", sorted(STOCK_READINGS))
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_ids_for_stock_capture_what_was_asked(setters, spec, architecture, data):
    """``stock_ids`` fed to SGLang's setter captures the plan's states; ``None`` only where no list can."""
    n = data.draw(st.integers(8, 40), label="n")
    boundaries = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=5, unique=True), label="boundaries")
    reading = STOCK_READINGS[architecture]
    declared = replace(spec, sources=tuple(parse_source(f"boundary{b}") for b in boundaries), order="as_listed")
    declared = replace(declared, origins={**spec.origins, "sources": "override"})
    plan = assembly.plan(declared, TargetFacts("t", architecture, n, 32, 96, reading))
    if plan.stock_ids is not None:
        assert sorted(captured(setters, architecture, list(plan.stock_ids), n)) == sorted(boundaries)
        return
    impossible = (
        (n in boundaries and not reading.captures_last)
        or (not reading.captures_residual and boundaries != [0])
        or (reading.ids == "first_is_one" and boundaries == [1])
    )
    assert impossible
