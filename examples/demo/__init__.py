"""``python -m examples.demo``: train a small GPT through gloo and through qcoll, and compare."""
