"""EAGLE-3 drafts in SGLang, served exactly as they were trained.

Rooms: ``spec`` and ``errors`` (the nouns), ``formats`` (checkpoint -> DraftSpec), ``assembly``
(DraftSpec + target -> AssemblyPlan), ``reference`` (the draft in plain PyTorch), ``kernels`` (PyTorch
twins and Triton kernels), ``probe`` (which assembly was trained?), ``resave`` over ``json_text`` (a draft
written anew), ``host`` (the only room that imports SGLang), ``cli``.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a source checkout `kernels/` stands beside this package, not in it (a regular top-level package of
# that name would shadow a dependency of SGLang); in a wheel it is installed inside. Inert in a wheel.
_root = Path(__file__).parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
