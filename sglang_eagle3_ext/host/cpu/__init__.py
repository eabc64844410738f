"""SGLang with EAGLE-3 on plain PyTorch: the CPU platform ``eagle3_ext`` and its attention backend ``eagle3_cpu``."""
