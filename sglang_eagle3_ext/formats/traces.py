"""What only one trainer writes: by it a draft is known whose architecture several trainers share."""

from __future__ import annotations

from collections.abc import Callable

from sglang_eagle3_ext.formats import automodel, modelopt, torchspec
from sglang_eagle3_ext.formats.folder import Folder

TRACES: dict[str, Callable[[Folder], str | None]] = {
    "automodel": automodel.find_trace,
    "modelopt": modelopt.find_trace,
    "torchspec": torchspec.find_trace,
}
"""Trainer -> what names its trace in a folder, ``None`` where there is none."""


def declared_producer(folder: Folder) -> str | None:
    """Return the trainer that an ``eagle3_ext`` names, which settles whose traces count."""
    producer = folder.declared.ext.producer
    return producer if isinstance(producer, str) else None


def find_traces(folder: Folder) -> dict[str, str]:
    """Name the trainers whose traces a folder bears, each with its trace."""
    found = ((trainer, find_trace(folder)) for trainer, find_trace in TRACES.items())
    return {trainer: trace for trainer, trace in found if trace is not None}
