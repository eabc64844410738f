"""Read a checkpoint folder into a :class:`~sglang_eagle3_ext.spec.DraftSpec`, one dialect per file."""
