"""The only room that imports SGLang."""
