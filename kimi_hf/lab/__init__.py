"""The lab: every claim of the ladder's story as an experiment that one command runs again."""
