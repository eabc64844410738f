"""SGLang with EAGLE-3 on plain PyTorch: the CPU platform ``eagle3_ext`` and its attention backend ``eagle3_cpu``.

Files: ``platform`` (what SGLang asks a platform), ``attention`` over ``segments`` (the backend and its
mathematics), ``tree`` and ``cache_locs`` (the operators of speculation), ``kv_pool``, ``linear`` and
``linear_methods`` (packed weights and where they go), ``operators`` over ``rows`` (norm, rotation,
activation), ``hooks`` (where SGLang has no seam for a platform).
"""

from __future__ import annotations

BACKEND = "eagle3_cpu"
"""Name of the attention backend on the command line."""


def register() -> None:
    """Make the backend's name known to the command line; everything else waits for the worker process."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
