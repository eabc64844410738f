"""``spec.parse_source`` against the grammar of docs/notation.md, written out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.spec import Source, parse_source


@pytest.mark.parametrize(
    ("text", "kind", "index"),
    [
        ("embed", "boundary", 0),
        ("layer0.input", "boundary", 0),
        ("layer0", "boundary", 1),
        ("layer31", "boundary", 32),
        ("layer31.input", "boundary", 31),
        ("boundary0", "boundary", 0),
        ("boundary17", "boundary", 17),
        ("last", "last", None),
        ("final_norm", "final_norm", None),
    ],
)
def test_reads_every_spelling(text, kind, index):
    assert parse_source(text) == Source(kind, index, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Embed",
        "layer",
        "layer-1",
        "layer03",
        "layer3.output",
        "boundary3.input",
        "boundary",
        " embed",
        "3",
        "layer3 ",
    ],
)
def test_rejects_other_spellings_and_names_the_grammar(text):
    with pytest.raises(ValueError, match=r"expected embed, layerK .*, layerK.input, boundaryB, last or final_norm"):
        parse_source(text)


@given(st.integers(0, 10**6))
def test_output_of_a_layer_is_the_input_of_the_next(k):
    assert parse_source(f"layer{k}").index == parse_source(f"layer{k + 1}.input").index
    assert parse_source(f"boundary{k}").index == parse_source(f"layer{k}.input").index


def test_assembly_offers_it():
    assert assembly.parse_source is parse_source
