"""Tests of the text models against goldens, definitions and each other."""
