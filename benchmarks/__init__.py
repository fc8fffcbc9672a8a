"""Measurements: side-by-side timings of kimi_hf and its peers. Never run by the tests."""
