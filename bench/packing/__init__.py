"""How well the binder packs GPUs: a production trace through the binder's own decisions."""
