"""The draft model classes that SGLang's registry serves."""
