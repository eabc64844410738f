"""Find out from evidence which assembly a draft was trained with.

``features``  what the target writes, and all its boundaries: captured in transformers, or read from a file
``search``    candidates, their scores, and the ascent over sources and switches
``verdict``   declared, stock and best replayed as a server would have counted them, and what follows
``report``    JSON, text, picture
``command``   ``sglang-eagle3 probe``
"""

from sglang_eagle3_ext.probe.command import add_command

__all__ = ["add_command"]
